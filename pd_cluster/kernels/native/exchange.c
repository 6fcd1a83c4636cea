/* Messages of a one-sided exchange in host memory: packed by destination, believed once their seal fits, unpacked by
 * slot, added up by token. `pd_cluster/parallel/wire.py` says what they look like and does the same in torch.
 */
#include <sched.h>
#include <time.h>

#include "exchange_rows.h"
#include "scratch.h"

#define HEADER 64
#define PRIME 0x9e3779b97f4a7c15ull
#define FOLD 0xff51afd7ed558ccdull

enum { AWAITED, ARRIVED, MISSING };

typedef struct {
    uint64_t tag, life, seal;
    uint32_t num_rows, num_pairs, missing, rest[7];
} Header;

typedef uint64_t v8 __attribute__((vector_size(64)));

static int64_t up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static int64_t message_bytes(const Exchange *e, int64_t phase, int64_t rows, int64_t pairs) {
    return HEADER + up(12 * pairs) + up(rows * row_bytes(e, phase));
}

static uint8_t *region(const Exchange *e, uint8_t *base, int64_t parity, int64_t phase, int64_t peer) {
    int64_t both = e->dispatch_bytes + e->combine_bytes;
    return base + (parity * e->num_ranks + peer) * both + phase * e->dispatch_bytes;
}

/* A polynomial over the message's 64-bit words in 32 interleaved lanes, its own field taken as 0. */
static uint64_t seal_of(const uint8_t *message, int64_t bytes) {
    v8 lanes[4] = {{0}}, first = *(const v8 *)message;
    first[2] = 0;
    lanes[0] = first;
    const v8 *blocks = (const v8 *)message;
    int64_t i = 1, n = bytes / 64;
    for (; i < n && i % 4; i++) lanes[i] = blocks[i];
    for (; i + 4 <= n; i += 4)
        for (int q = 0; q < 4; q++) lanes[q] = lanes[q] * PRIME + blocks[i + q];
    for (; i < n; i++) lanes[i % 4] = lanes[i % 4] * PRIME + blocks[i];
    uint64_t seal = bytes;
    for (int q = 0; q < 4; q++)
        for (int l = 0; l < 8; l++) {
            seal = seal * FOLD + lanes[q][l];
            seal ^= seal >> 29;
        }
    return seal;
}

static void close_message(const Exchange *e, uint8_t *message, int64_t phase, uint64_t tag, int64_t rows, int64_t pairs,
                          int64_t missing) {
    int64_t payload = HEADER + up(12 * pairs), end = payload + rows * row_bytes(e, phase);
    memset(message + HEADER + 12 * pairs, 0, payload - HEADER - 12 * pairs);
    memset(message + end, 0, up(end) - end);
    Header header = {tag, e->life, 0, rows, pairs, missing, {0}};
    memcpy(message, &header, sizeof header);
    header.seal = seal_of(message, up(end));
    memcpy(message, &header, sizeof header);
}

/* ---- pairs of a message: rows, slots and weights, one array behind the other */

typedef struct {
    int32_t *rows, *slots;
    float *weights;
    uint8_t *payload;
} Body;

static Body body_of(uint8_t *message, int64_t pairs) {
    int32_t *rows = (int32_t *)(message + HEADER);
    return (Body){rows, rows + pairs, (float *)(rows + 2 * pairs), message + HEADER + up(12 * pairs)};
}

/* Pack tokens for the ranks that own their slots. `copies`: for each (token, owner), owners ascending, the owner and
 * the row in its message, [num_tokens * num_chosen][2] room; `num_copies` [num_tokens]. The message for the own rank
 * is written where it is read. `busy` [num_ranks]: their room may not be touched. Returns -1, or the index of a slot
 * that does not exist.
 */
int64_t exchange_pack(const Exchange *e, const void *hidden, int64_t num_tokens, const int64_t *slots,
                      const float *weights, int64_t num_chosen, uint64_t tag, int64_t parity, const uint8_t *busy,
                      int64_t *copies, int64_t *num_copies, int64_t *copy_counts, int64_t *bytes) {
    int64_t D = e->num_ranks, S = e->slots_per_rank, width = e->hidden * value_bytes(e);
    int64_t pair_counts[D], last_token[D], row_of[D], next_pair[D];
    Body bodies[D];
    for (int64_t d = 0; d < D; d++) {
        pair_counts[d] = copy_counts[d] = next_pair[d] = 0;
        last_token[d] = -1;
    }
    int64_t *to = copies;
    for (int64_t t = 0; t < num_tokens; t++) {
        int64_t *first = to;
        for (int64_t k = 0; k < num_chosen; k++) {
            int64_t slot = slots[t * num_chosen + k];
            if (slot < 0 || slot >= D * S) return t * num_chosen + k;
            int64_t owner = slot / S;
            pair_counts[owner]++;
            if (last_token[owner] == t) continue;
            last_token[owner] = t;
            int64_t *at = to;
            for (; at > first && at[-2] > owner; at -= 2) {
                at[0] = at[-2];
                at[1] = at[-1];
            }
            at[0] = owner;
            at[1] = copy_counts[owner]++;
            to += 2;
        }
        num_copies[t] = (to - first) / 2;
    }
    for (int64_t d = 0; d < D; d++)
        bodies[d] = body_of(region(e, d == e->rank ? e->receive : e->send, parity, DISPATCH, d), pair_counts[d]);
    int64_t size = row_bytes(e, DISPATCH);
    const int64_t *copy = copies;
    for (int64_t t = 0; t < num_tokens; t++) {
        const uint8_t *packed = 0;
        for (int64_t i = 0; i < num_copies[t]; i++, copy += 2) {
            row_of[copy[0]] = copy[1];
            if (busy[copy[0]]) continue;
            uint8_t *out = bodies[copy[0]].payload + copy[1] * size;
            if (packed)
                memcpy(out, packed, size);
            else
                put_row(e, (const uint8_t *)hidden + t * width, out);
            packed = out;
        }
        for (int64_t k = 0; k < num_chosen; k++) {
            int64_t slot = slots[t * num_chosen + k], owner = slot / S;
            if (busy[owner]) continue;
            int64_t p = next_pair[owner]++;
            bodies[owner].rows[p] = row_of[owner];
            bodies[owner].slots[p] = slot % S;
            bodies[owner].weights[p] = weights[t * num_chosen + k];
        }
    }
    for (int64_t d = 0; d < D; d++) {
        bytes[d] = message_bytes(e, DISPATCH, copy_counts[d], pair_counts[d]);
        if (busy[d]) continue;
        uint8_t *message = region(e, d == e->rank ? e->receive : e->send, parity, DISPATCH, d);
        close_message(e, message, DISPATCH, tag, copy_counts[d], pair_counts[d], 0);
    }
    return -1;
}

/* ---- waiting */

/* What a region holds for `tag`: AWAITED while it is not whole, MISSING when its sender has gone on without us. */
static uint8_t look(const Exchange *e, uint8_t *message, int64_t phase, uint64_t tag, uint64_t life, int64_t *counts) {
    Header header;
    if (__atomic_load_n((uint64_t *)message, __ATOMIC_ACQUIRE) < tag) return AWAITED;
    memcpy(&header, message, sizeof header);
    int64_t room = phase == DISPATCH ? e->dispatch_bytes : e->combine_bytes;
    if (header.life != life || header.num_rows > room || header.num_pairs > room) return AWAITED;
    int64_t bytes = message_bytes(e, phase, header.num_rows, header.num_pairs);
    if (bytes > room || seal_of(message, bytes) != header.seal) return AWAITED;
    if (header.tag != tag) return MISSING;
    counts[0] = header.num_rows;
    counts[1] = header.num_pairs;
    return ARRIVED;
}

/* Bring `state` [num_ranks] forward until nobody is awaited or `budget_ns` have passed; how many are awaited still.
 * `counts` [num_ranks][2]: rows and pairs of what arrived. `asleep`: the wait is long already, leave the core to others.
 */
int64_t exchange_wait(const Exchange *e, int64_t phase, int64_t parity, uint64_t tag, uint8_t *state, int64_t *counts,
                      int64_t budget_ns, int64_t asleep) {
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (;;) {
        int64_t awaited = 0;
        for (int64_t d = 0; d < e->num_ranks; d++) {
            if (state[d] != AWAITED) continue;
            uint8_t *message = region(e, e->receive, parity, phase, d);
            state[d] = look(e, message, phase, tag, e->lives[d], counts + 2 * d);
            if (state[d] == AWAITED && __atomic_load_n(e->ignored + d, __ATOMIC_RELAXED)) state[d] = MISSING;
            if (state[d] == MISSING) counts[2 * d] = counts[2 * d + 1] = 0;
            awaited += state[d] == AWAITED;
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (!awaited || (now.tv_sec - start.tv_sec) * 1000000000 + now.tv_nsec - start.tv_nsec >= budget_ns)
            return awaited;
        if (asleep)
            nanosleep(&(struct timespec){0, 50000}, 0);
        else
            sched_yield();
    }
}

/* ---- unpacking and going home */

/* Rows of all arrived messages by source, and their pairs sorted by slot, stably. A message that changes meanwhile has
 * a sender that went on without this rank: its `state` becomes MISSING and its weights 0. Sizes are those of `counts`.
 */
void exchange_unpack(const Exchange *e, int64_t parity, uint64_t tag, uint8_t *state, const int64_t *counts,
                     void *hidden, int64_t *pair_rows, int64_t *pair_slots, float *pair_weights, int64_t *slot_counts) {
    int64_t num_pairs = 0, width = e->hidden * value_bytes(e), size = row_bytes(e, DISPATCH);
    for (int64_t d = 0; d < e->num_ranks; d++) num_pairs += counts[2 * d + 1];
    int64_t *rows = scratch(PAIRS, num_pairs * 20 + e->slots_per_rank * 8), *starts = rows + num_pairs;
    int32_t *slots = (int32_t *)(starts + e->slots_per_rank);
    float *weights = (float *)(slots + num_pairs);
    memset(slot_counts, 0, e->slots_per_rank * sizeof(int64_t));
    int64_t first_row = 0, pair = 0;
    for (int64_t d = 0; d < e->num_ranks; d++) {
        int64_t num_rows = counts[2 * d], count = counts[2 * d + 1];
        uint8_t *message = region(e, e->receive, parity, DISPATCH, d);
        Body body = body_of(message, count);
        for (int64_t r = 0; r < num_rows; r++)
            get_row(e, body.payload + r * size, (uint8_t *)hidden + (first_row + r) * width);
        memcpy(slots + pair, body.slots, count * 4);
        memcpy(weights + pair, body.weights, count * 4);
        int64_t broken = 0;
        for (int64_t p = 0; p < count; p++) {
            int32_t row = __atomic_load_n(body.rows + p, __ATOMIC_RELAXED), slot = slots[pair + p];
            int good = row >= 0 && row < num_rows && slot >= 0 && slot < e->slots_per_rank;
            broken |= !good;
            rows[pair + p] = good ? first_row + row : first_row;
            if (!good) slots[pair + p] = 0;
        }
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (state[d] == ARRIVED && (broken || __atomic_load_n((uint64_t *)message, __ATOMIC_RELAXED) != tag)) {
            state[d] = MISSING;
            memset(weights + pair, 0, count * 4);
            memset((uint8_t *)hidden + first_row * width, 0, num_rows * width);
        }
        for (int64_t p = 0; p < count; p++) slot_counts[slots[pair + p]]++;
        first_row += num_rows;
        pair += count;
    }
    starts[0] = 0;
    for (int64_t s = 1; s < e->slots_per_rank; s++) starts[s] = starts[s - 1] + slot_counts[s - 1];
    for (int64_t p = 0; p < num_pairs; p++) {
        int64_t to = starts[slots[p]]++;
        pair_rows[to] = rows[p];
        pair_slots[to] = slots[p];
        pair_weights[to] = weights[p];
    }
}

/* Messages home: each source's rows of `outputs`, or word that its rows were missing here. */
void exchange_reply(const Exchange *e, int64_t parity, uint64_t tag, const uint8_t *state, const int64_t *counts,
                    const void *outputs, const uint8_t *busy, int64_t *bytes) {
    int64_t width = e->hidden * value_bytes(e), row = 0;
    for (int64_t d = 0; d < e->num_ranks; row += counts[2 * d++]) {
        int64_t num_rows = state[d] == ARRIVED ? counts[2 * d] : 0;
        bytes[d] = message_bytes(e, COMBINE, num_rows, 0);
        if (d == e->rank || busy[d]) continue;
        uint8_t *message = region(e, e->send, parity, COMBINE, d);
        memcpy(message + HEADER, (const uint8_t *)outputs + row * width, num_rows * width);
        close_message(e, message, COMBINE, tag, num_rows, 0, state[d] != ARRIVED);
    }
}

/* out[t] = the sum of a token's copies in the order of ranks, float32, rounded once; `own` are the rows that stayed
 * here. Returns how many ranks that were sent copies gave none back; these count as zero.
 */
int64_t exchange_add(const Exchange *e, int64_t parity, uint64_t tag, const uint8_t *state, const void *own,
                     int64_t num_tokens, const int64_t *copies, const int64_t *num_copies, const int64_t *copy_counts,
                     void *out) {
    int64_t D = e->num_ranks, width = e->hidden * value_bytes(e), missing = 0;
    const uint8_t *rows[D];
    for (int64_t d = 0; d < D; d++) {
        uint8_t *message = region(e, e->receive, parity, COMBINE, d);
        const Header *header = (const Header *)message;
        rows[d] = d == e->rank ? own : message + HEADER;
        if (d != e->rank && (state[d] != ARRIVED || header->missing || header->num_rows != copy_counts[d])) rows[d] = 0;
    }
    const int64_t *copy = copies;
    for (int64_t t = 0; t < num_tokens; copy += 2 * num_copies[t++]) {
        uint8_t *to = (uint8_t *)out + t * width;
        for (int64_t c = 0; c < e->hidden; c += LANES) {
            int64_t n = e->hidden - c;
            vf sum = vset(0);
            for (int64_t i = 0; i < num_copies[t]; i++) {
                const uint8_t *from = rows[copy[2 * i]];
                if (!from) continue;
                from += copy[2 * i + 1] * width;
                sum += n < LANES ? load_some(e, from, c, n) : load16(e, from, c);
            }
            if (n < LANES)
                store_some(e, to, c, sum, n);
            else
                store16(e, to, c, sum);
        }
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    for (int64_t d = 0; d < D; d++) {
        if (d == e->rank || !copy_counts[d]) continue;
        uint8_t *message = region(e, e->receive, parity, COMBINE, d);
        missing += !rows[d] || __atomic_load_n((uint64_t *)message, __ATOMIC_RELAXED) != tag;
    }
    return missing;
}
