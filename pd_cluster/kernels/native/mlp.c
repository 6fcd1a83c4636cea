#include "mlp.h"

#include "scratch.h"

/* x += mlp(norm(x)), or `out` = mlp(norm(x)): [num_tokens, hidden]; the norm may be left out. */
void mlp_layer(const MlpLayer *layer, int64_t num_tokens, bf16 *x, bf16 *out, int64_t num_threads) {
    int64_t hidden = layer->gate_up.k, width = layer->down.k;
    bf16 *normed = layer->norm.weight ? scratch(NORMED, num_tokens * hidden * sizeof(bf16)) : x;
    bf16 *gated = scratch(HIDDEN, num_tokens * width * sizeof(bf16));
    TEAM(num_threads) {
        if (layer->norm.weight) normalise(&layer->norm, x, hidden, normed, hidden, num_tokens, hidden);
        linear(&layer->gate_up, normed, hidden, num_tokens, gated, width, STORE, upcoming());
        linear(&layer->down, gated, width, num_tokens, out ? out : x, hidden, out ? STORE : ADD, upcoming());
    }
}
