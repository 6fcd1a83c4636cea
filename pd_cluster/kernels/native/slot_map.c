/* Which slot each (token, expert) goes to: the token's hash among the weights of the expert's copies. The same in plain
 * numpy: pd_cluster/parallel/replicas.py.
 */
#include <stdint.h>

#define HASH_BITS 16

/* experts, out [num_tokens, num_chosen]; mix [num_tokens], below 2^31; slots, thresholds [E, columns], of which `width`
 * are in use.
 */
void slots_by_hash(const int64_t *experts, const int64_t *mix, int64_t num_tokens, int64_t num_chosen,
                   const int64_t *slots, const int64_t *thresholds, int64_t columns, int64_t width, int64_t *out) {
    for (int64_t t = 0; t < num_tokens; t++)
        for (int64_t k = 0; k < num_chosen; k++) {
            int64_t expert = experts[t * num_chosen + k], copy = 0;
            uint64_t mixed = ((uint64_t)mix[t] + (uint64_t)expert * 0x9E3779B1u) & 0x7FFFFFFF;
            int64_t hashed = (int64_t)((mixed * 0x85EBCA6Bu & 0x7FFFFFFF) >> (31 - HASH_BITS));
            for (int64_t c = 0; c < width; c++) copy += hashed >= thresholds[expert * columns + c];
            out[t * num_chosen + k] = slots[expert * columns + copy];
        }
}
