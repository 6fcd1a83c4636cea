/* Softmax attention of a run of query rows over cached keys and values, 128 keys at a time.
 *
 * Blocks of keys start at multiples of 128 of the position, and a row keeps its own running maximum: a row's bits
 * depend on its query and on what is cached, not on the other rows of the step nor on how its prompt was cut.
 */
#pragma once

#include "vector.h"

#define UNIT 16
#define KEY_BLOCK 128
#define ROWS_AT_ONCE 192 /* query rows (token, head) that share one packing of a block of keys */

/* Where one head's keys and values lie, in units of 16 tokens: at base + units[i] * unit_stride, or in a row when
 * `units` is null. A second part of the keys, contiguous over all tokens, may follow the first.
 */
typedef struct {
    const int64_t *units;
    int64_t unit_stride, token_stride;
    const bf16 *keys, *values;
    int64_t key_dim, value_dim;
    const bf16 *more_keys;
    int64_t more_stride, more_dim;
    int64_t unit_bytes; /* that lie together from the keys of a unit on; 0: they are in the caches already */
    int64_t num_units;  /* that the queries see */
} Cache;

/* `num_tokens` query tokens from `position` on, `num_heads` heads each, against one head of keys. */
typedef struct {
    const bf16 *q;
    int64_t q_token_stride, q_head_stride;
    bf16 *out;
    int64_t out_token_stride, out_head_stride;
    int64_t num_heads, num_tokens, position;
    float scale;
} Queries;

/* out = softmax(scale q K^T) V, token t seeing keys up to position + t. One thread; the first units of `next`, unless
 * null, are fetched meanwhile, for they are read after this call.
 */
void attend(const Cache *cache, const Queries *queries, const Cache *next);
