/* From hidden states to logits, and to the likeliest token. */
#include "scratch.h"
#include "step.h"

/* Logits of chosen rows: norm, then the head; float32 [num_rows, vocabulary]. */
void head_layer(const Norm *norm, const Linear *head, const bf16 *x, int64_t num_rows, float *logits,
                int64_t num_threads) {
    bf16 *normed = scratch(NORMED, num_rows * head->k * sizeof(bf16));
    TEAM(num_threads) {
        normalise(norm, x, head->k, normed, head->k, num_rows, head->k);
        linear(head, normed, head->k, num_rows, logits, head->n, STORE_FLOAT, 0);
    }
}

/* The first of each row's highest values; a NaN wins. */
void highest_of_rows(const float *rows, int64_t stride, int64_t num_rows, int64_t num_columns, int64_t *where,
                     float *highest, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1) schedule(static)
    for (int64_t r = 0; r < num_rows; r++) {
        const float *row = rows + r * stride;
        vf most = vset(-__builtin_inff()), poison = vset(0);
        int64_t c = 0;
        for (; c + LANES <= num_columns; c += LANES) {
            vf v = vload(row + c);
            most = vmax(v, most);
            poison += v * 0.0f; /* a NaN stays; so do infinities, which the search below tells apart */
        }
        float best = vhighest(most);
        int unsure = vsum(poison) != 0 || __builtin_isnan(vsum(poison));
        for (; c < num_columns; c++) {
            best = row[c] > best ? row[c] : best;
            unsure |= __builtin_isnan(row[c]);
        }
        int64_t at = 0;
        if (unsure) {
            for (int64_t i = 0; i < num_columns; i++)
                if (__builtin_isnan(row[i])) {
                    at = i, best = row[i];
                    break;
                }
        }
        if (!__builtin_isnan(best)) {
            vf equal = vset(best);
            for (c = 0; c + LANES <= num_columns; c += LANES) {
                vi same = vload(row + c) == equal;
                int any = 0;
                for (int i = 0; i < LANES; i++) any |= same[i];
                if (any) break;
            }
            for (at = c; at < num_columns && row[at] != best;) at++;
        }
        where[r] = at;
        highest[r] = best;
    }
}
