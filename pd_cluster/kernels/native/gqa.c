/* Grouped-query attention, from the norm before it to the sum behind it. */
#include "attention.h"
#include "norm.h"
#include "scratch.h"
#include "step.h"

typedef struct {
    Norm norm, qk_norm; /* qk_norm.weight [heads + kv_heads, head_dim] or null */
    Linear qkv, out;
    int64_t num_heads, num_kv_heads, num_groups, head_dim;
    const int64_t *read; /* [num_groups]: the KV head that each group of queries reads */
    int64_t rope_dim, interleaved;
    double scale;
} GqaLayer;

static void write_and_rotate(const GqaLayer *layer, const Step *step, const Pages *pages, bf16 *qkv) {
    int64_t dim = layer->head_dim, num_rotated = layer->num_heads + layer->num_kv_heads;
    int64_t width = (num_rotated + layer->num_kv_heads) * dim, half = layer->rope_dim / 2;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < step->num_tokens; t++) {
        bf16 *heads = qkv + t * width;
        Rotation rotation = {layer->rope_dim, layer->interleaved, step->cos + t * half, step->sin + t * half};
        bf16 *row = pages->base + step->token_units[t] * pages->unit_stride + step->token_offsets[t] * dim;
        for (int64_t h = 0; h < num_rotated; h++) {
            bf16 *head = heads + h * dim;
            if (layer->qk_norm.weight) rms_norm(head, head, layer->qk_norm.weight + h * dim, dim, layer->qk_norm.eps);
            bf16 *to = h < layer->num_heads ? head : row + (h - layer->num_heads) * pages->head_stride;
            rotate(to, head, dim, &rotation);
        }
        for (int64_t h = 0; h < layer->num_kv_heads; h++)
            memcpy(row + h * pages->head_stride + UNIT * dim, heads + (num_rotated + h) * dim, dim * sizeof(bf16));
    }
}

INLINE Cache gqa_cache(const GqaLayer *layer, const Step *step, const Pages *pages, const Task *task) {
    const bf16 *keys = pages->base + layer->read[task->group] * pages->head_stride;
    const Segment *segment = step->segments + task->segment;
    const int64_t *units = step->units + segment->first_unit;
    return (Cache){units, pages->unit_stride, layer->head_dim, keys, keys + UNIT * layer->head_dim,
                   layer->head_dim, layer->head_dim, 0, 0, 0, 4 * UNIT * layer->head_dim, units_seen(segment, task)};
}

/* x += attention(norm(x)), or `partial` = that: [num_tokens, hidden]. The new tokens' keys and values are written. */
void gqa_layer(const GqaLayer *layer, const Step *step, const Pages *pages, bf16 *x, bf16 *partial) {
    int64_t T = step->num_tokens, hidden = layer->qkv.k, dim = layer->head_dim;
    int64_t width = layer->qkv.n, q_width = layer->num_heads * dim, heads = layer->num_heads / layer->num_groups;
    bf16 *normed = scratch(NORMED, T * hidden * sizeof(bf16));
    bf16 *qkv = scratch(PROJECTED, T * width * sizeof(bf16));
    bf16 *attended = scratch(ATTENDED, T * q_width * sizeof(bf16));
    int64_t num_tasks, unit_bytes = 4 * UNIT * dim;
    Task *tasks = attention_tasks(step, layer->num_groups, heads, 0, &num_tasks);
    TEAM(step->num_threads) {
        normalise(&layer->norm, x, hidden, normed, hidden, T, hidden);
        linear(&layer->qkv, normed, hidden, T, qkv, width, STORE, upcoming());
        write_and_rotate(layer, step, pages, qkv);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_tasks; i++) {
            const Segment *segment = step->segments + tasks[i].segment;
            int64_t token = segment->first_token + tasks[i].first, first_head = tasks[i].group * heads * dim;
            Cache cache = gqa_cache(layer, step, pages, tasks + i);
            Cache next = i + 1 < num_tasks ? gqa_cache(layer, step, pages, tasks + i + 1) : cache;
            Queries queries = {qkv + token * width + first_head, width, dim,
                               attended + token * q_width + first_head, q_width, dim,
                               heads, tasks[i].last - tasks[i].first, segment->num_prefix + tasks[i].first,
                               layer->scale};
            attend(&cache, &queries, &next);
        }
        /* the same keys and values of the next layer lie behind this one's; something else behind the last layer's */
        expect_units(step, tasks, num_tasks, pages, layer->read, unit_bytes, unit_bytes);
        linear(&layer->out, attended, q_width, T, partial ? partial : x, hidden, partial ? STORE : ADD, upcoming());
    }
}
