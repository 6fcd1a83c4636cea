#include "ahead.h"

#include "scratch.h"

static _Thread_local Stream stream;

Stream *upcoming(void) { return &stream; }

const char **pieces_ahead(int64_t capacity) { return scratch(AHEAD, capacity * sizeof(char *)); }

void expect(const char **pieces, int64_t count, int64_t piece_bytes) {
    stream = (Stream){pieces, pieces + count, piece_bytes, 0, 0};
}

int take_chunks(Stream *s, const char **chunks, int64_t count) {
    if (!s || (s->left < CHUNK_BYTES && s->piece == s->end)) return 0;
    for (int64_t c = 0; c < count; c++) {
        if (s->left < CHUNK_BYTES) {
            if (s->piece == s->end) {
                chunks[c] = chunks[c - 1];
                continue;
            }
            s->at = *s->piece++;
            s->left = s->piece_bytes;
        }
        chunks[c] = s->at;
        s->at += CHUNK_BYTES;
        s->left -= CHUNK_BYTES;
    }
    return 1;
}
