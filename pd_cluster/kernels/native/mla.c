/* Multi-head latent attention (arXiv 2405.04434), from the norm before it to the sum behind it. */
#include "attention.h"
#include "norm.h"
#include "scratch.h"
#include "step.h"

typedef struct {
    Norm norm, q_norm, kv_norm; /* q_norm.weight null: queries are not compressed */
    Linear compress, q_b, out;
    Linear absorb, expand_keys, expand_values; /* of the first head; the others follow at the strides */
    int64_t absorb_stride, expand_keys_stride, expand_values_stride;
    int64_t num_heads, q_lora_rank, kv_lora_rank, nope_dim, rope_dim, value_dim, interleaved;
    double scale;
} MlaLayer;

static void write_latents(const MlaLayer *layer, const Step *step, const Pages *pages, const bf16 *compressed,
                          bf16 *q) {
    int64_t half = layer->rope_dim / 2, q_dim = layer->nope_dim + layer->rope_dim;
    int64_t latent_dim = layer->kv_lora_rank + layer->rope_dim;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < step->num_tokens; t++) {
        const bf16 *from = compressed + t * layer->compress.n + layer->q_lora_rank;
        bf16 *row = pages->base + step->token_units[t] * pages->unit_stride + step->token_offsets[t] * latent_dim;
        Rotation rotation = {layer->rope_dim, layer->interleaved, step->cos + t * half, step->sin + t * half};
        rms_norm(row, from, layer->kv_norm.weight, layer->kv_lora_rank, layer->kv_norm.eps);
        rotate(row + layer->kv_lora_rank, from + layer->kv_lora_rank, layer->rope_dim, &rotation);
        for (int64_t h = 0; h < layer->num_heads; h++) {
            bf16 *head = q + (t * layer->num_heads + h) * q_dim + layer->nope_dim;
            rotate(head, head, layer->rope_dim, &rotation);
        }
    }
}

/* Runs of neighbouring tokens in the same form: all decodes at once, then each segment. */
static int64_t next_run(const Step *step, int64_t *segment, int64_t *first, int64_t *num_tokens) {
    while (*segment < step->num_segments && step->segments[*segment].expanded) ++*segment;
    if (*segment >= step->num_segments) return 0;
    *first = step->segments[*segment].first_token;
    if (*segment < step->num_decodes) {
        *num_tokens = step->num_decodes - *segment;
        *segment = step->num_decodes;
    } else {
        *num_tokens = step->segments[*segment].num_tokens;
        ++*segment;
    }
    return 1;
}

INLINE Cache latent_cache(const MlaLayer *layer, const Step *step, const Pages *pages, const Task *task) {
    const Segment *segment = step->segments + task->segment;
    int64_t C = layer->kv_lora_rank, latent_dim = C + layer->rope_dim;
    return (Cache){step->units + segment->first_unit, pages->unit_stride, latent_dim, pages->base, pages->base,
                   latent_dim, C, 0, 0, 0, 2 * UNIT * latent_dim, units_seen(segment, task)};
}

static void attend_absorbed(const MlaLayer *layer, const Step *step, const Pages *pages, const bf16 *q, bf16 *queries,
                            bf16 *mixed, bf16 *attended, const Task *tasks, int64_t num_tasks) {
    int64_t heads = layer->num_heads, C = layer->kv_lora_rank, R = layer->rope_dim, q_dim = layer->nope_dim + R;
    int64_t latent_dim = C + R, V = layer->value_dim, first, count;
    for (int64_t segment = 0; next_run(step, &segment, &first, &count);) {
#pragma omp for schedule(static)
        for (int64_t h = 0; h < heads; h++) {
            Linear absorb = matrix_of(&layer->absorb, layer->absorb_stride, h);
            const bf16 *from = q + (first * heads + h) * q_dim;
            bf16 *to = queries + (first * heads + h) * latent_dim;
            linear_panels(&absorb, from, heads * q_dim, count, to, heads * latent_dim, STORE, 0, num_panels(&absorb),
                          0);
            for (int64_t t = 0; t < count; t++)
                memcpy(to + t * heads * latent_dim + C, from + t * heads * q_dim + layer->nope_dim, R * sizeof(bf16));
        }
    }
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_tasks; i++) {
        const Segment *segment = step->segments + tasks[i].segment;
        int64_t token = segment->first_token + tasks[i].first;
        Cache cache = latent_cache(layer, step, pages, tasks + i);
        Cache next = i + 1 < num_tasks ? latent_cache(layer, step, pages, tasks + i + 1) : cache;
        Queries rows = {queries + token * heads * latent_dim, heads * latent_dim, latent_dim,
                        mixed + token * heads * C, heads * C, C,
                        heads, tasks[i].last - tasks[i].first, segment->num_prefix + tasks[i].first, layer->scale};
        attend(&cache, &rows, &next);
    }
    for (int64_t segment = 0; next_run(step, &segment, &first, &count);) {
#pragma omp for schedule(static)
        for (int64_t h = 0; h < heads; h++) {
            Linear expand = matrix_of(&layer->expand_values, layer->expand_values_stride, h);
            linear_panels(&expand, mixed + (first * heads + h) * C, heads * C, count,
                          attended + (first * heads + h) * V, heads * V, STORE, 0, num_panels(&expand), 0);
        }
    }
}

/* One segment whose latents are expanded to keys and values, a head at a time; `latents` holds them in a row. */
static void attend_expanded(const MlaLayer *layer, const Step *step, const Pages *pages, const Segment *segment,
                            const bf16 *q, bf16 *latents, bf16 *attended) {
    int64_t heads = layer->num_heads, C = layer->kv_lora_rank, R = layer->rope_dim, N = layer->nope_dim;
    int64_t latent_dim = C + R, V = layer->value_dim, num_keys = segment->num_prefix + segment->num_tokens;
    int64_t num_units = (num_keys + UNIT - 1) / UNIT, width = N + V;
#pragma omp for schedule(static)
    for (int64_t u = 0; u < num_units; u++)
        memcpy(latents + u * UNIT * latent_dim,
               pages->base + step->units[segment->first_unit + u] * pages->unit_stride,
               UNIT * latent_dim * sizeof(bf16));
#pragma omp for schedule(dynamic)
    for (int64_t h = 0; h < heads; h++) {
        bf16 *expanded = scratch(EXPANDED, num_units * UNIT * width * sizeof(bf16));
        Linear keys = matrix_of(&layer->expand_keys, layer->expand_keys_stride, h);
        Linear values = matrix_of(&layer->expand_values, layer->expand_values_stride, h);
        linear_panels(&keys, latents, latent_dim, num_units * UNIT, expanded, width, STORE, 0, num_panels(&keys),
                      0);
        linear_panels(&values, latents, latent_dim, num_units * UNIT, expanded + N, width, STORE, 0,
                      num_panels(&values), 0);
        Cache cache = {0, UNIT * width, width, expanded, expanded + N, N, V, latents + C, latent_dim, R, 0, num_units};
        for (int64_t first = 0; first < segment->num_tokens; first += ROWS_AT_ONCE) {
            int64_t left = segment->num_tokens - first, token = segment->first_token + first;
            Queries rows = {q + (token * heads + h) * (N + R), heads * (N + R), 0,
                            attended + (token * heads + h) * V, heads * V, 0,
                            1, left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE, segment->num_prefix + first, layer->scale};
            attend(&cache, &rows, 0);
        }
    }
}

/* x += attention(norm(x)), or `partial` = that: [num_tokens, hidden]. The new tokens' latents are written. */
void mla_layer(const MlaLayer *layer, const Step *step, const Pages *pages, bf16 *x, bf16 *partial) {
    int64_t T = step->num_tokens, hidden = layer->compress.k, heads = layer->num_heads, num_tasks, num_units = 0;
    int64_t latent_dim = layer->kv_lora_rank + layer->rope_dim, compressed_dim = layer->compress.n;
    bf16 *normed = scratch(NORMED, T * hidden * sizeof(bf16));
    bf16 *compressed = scratch(HIDDEN, T * (compressed_dim + layer->q_lora_rank) * sizeof(bf16));
    bf16 *q_input = layer->q_norm.weight ? compressed + T * compressed_dim : normed;
    bf16 *q = scratch(PROJECTED, T * layer->q_b.n * sizeof(bf16));
    bf16 *queries = scratch(QUERIES, T * heads * (latent_dim + layer->kv_lora_rank) * sizeof(bf16));
    bf16 *attended = scratch(ATTENDED, T * layer->out.k * sizeof(bf16));
    for (int64_t s = 0; s < step->num_segments; s++) {
        const Segment *segment = step->segments + s;
        int64_t units = (segment->num_prefix + segment->num_tokens + UNIT - 1) / UNIT;
        if (segment->expanded && units > num_units) num_units = units;
    }
    bf16 *latents = scratch(LATENTS, num_units * UNIT * latent_dim * sizeof(bf16));
    Task *tasks = attention_tasks(step, 1, heads, 0, &num_tasks);
    TEAM(step->num_threads) {
        expect_units(step, tasks, num_tasks, pages, 0, 0, 2 * UNIT * latent_dim);
        normalise(&layer->norm, x, hidden, normed, hidden, T, hidden);
        linear(&layer->compress, normed, hidden, T, compressed, compressed_dim, STORE, upcoming());
        if (layer->q_norm.weight)
            normalise(&layer->q_norm, compressed, compressed_dim, q_input, layer->q_b.k, T, layer->q_b.k);
        linear(&layer->q_b, q_input, layer->q_b.k, T, q, layer->q_b.n, STORE, upcoming());
        write_latents(layer, step, pages, compressed, q);
        attend_absorbed(layer, step, pages, q, queries, queries + T * heads * latent_dim, attended, tasks, num_tasks);
        for (int64_t s = 0; s < step->num_segments; s++)
            if (step->segments[s].expanded)
                attend_expanded(layer, step, pages, step->segments + s, q, latents, attended);
        expect(0, 0, 1);
        linear(&layer->out, attended, layer->out.k, T, partial ? partial : x, hidden, partial ? STORE : ADD, 0);
    }
}
