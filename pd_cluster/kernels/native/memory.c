#include "vector.h"

#define BLOCK 256 /* bytes */

/* Read memory once, as a bound for what reads it: `num_streams` parts side by side, each with lines fetched `ahead`
 * bytes before they are read unless that is 0. The sum keeps the compiler from leaving it out.
 */
float sum_of_bytes(const char *memory, int64_t num_bytes, int64_t num_streams, int64_t ahead) {
    vf sums[4] = {vset(0), vset(0), vset(0), vset(0)};
    int64_t part = num_bytes / num_streams / BLOCK * BLOCK;
    for (int64_t i = 0; i < part; i += BLOCK)
        for (int64_t s = 0; s < num_streams; s++) {
            const char *block = memory + s * part + i;
            if (ahead)
                for (int line = 0; line < BLOCK; line += 64) __builtin_prefetch(block + ahead + line, 0, 2);
            for (int v = 0; v < 4; v++) sums[v] += vload((const float *)block + v * LANES);
        }
    return vsum(sums[0] + sums[1] + sums[2] + sums[3]);
}
