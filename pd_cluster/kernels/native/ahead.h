/* What a thread will read soon: pieces of memory of one size, fetched into the second cache (from where they sink into
 * the third) while matrix products of many rows leave the memory idle. To be wrong about it costs time alone.
 */
#pragma once

#include <stdint.h>

typedef struct {
    const char *const *piece, *const *end; /* those not begun */
    int64_t piece_bytes;
    const char *at; /* in the piece that was begun */
    int64_t left;
} Stream;

#define CHUNK_BYTES 1024
#define MOST_AHEAD (8 << 20) /* more would push out what it fetched first */

/* The thread's own, kept from call to call. */
Stream *upcoming(void);

/* Room for the addresses of pieces, of which `expect` takes the first `count`, 0 to forget what was expected. */
const char **pieces_ahead(int64_t capacity);
void expect(const char **pieces, int64_t count, int64_t piece_bytes);

/* The next `count` chunks; 0 when nothing is left, or when there is no stream. */
int take_chunks(Stream *stream, const char **chunks, int64_t count);
