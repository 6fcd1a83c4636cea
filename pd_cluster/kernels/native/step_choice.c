/* Which copy of its expert each token of a step goes to, from the step's own counts: loads are poured over the ranks
 * that hold an expert until the hottest is as low as it gets, then rounded to whole tokens.
 *
 * All arithmetic is in integers, tokens in fixed point, so that every machine chooses alike. The same in Python, number
 * for number: pd_cluster/parallel/step_choice.py.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define FRACTION 10
#define ONE ((int64_t)1 << FRACTION)
#define CLOSE (ONE / 16)
#define MAX_ROUNDS 24

typedef struct {
    int64_t expert, count, copies, first; /* first: where its copies begin in `parts` */
} Split;

static int heavier_first(const void *a, const void *b) {
    const Split *x = a, *y = b;
    if (x->count != y->count) return x->count < y->count ? 1 : -1;
    return x->expert < y->expert ? -1 : 1;
}

/* Pour `load` over vessels that hold `below`, up to one level, the lowest first: [copies] into `parts`. */
static void fill(int64_t load, int64_t copies, const int64_t *below, int64_t *parts) {
    int64_t order[copies], width = 0, volume = 0;
    for (int64_t i = 0; i < copies; i++) {
        int64_t j = i;
        for (; j > 0 && below[order[j - 1]] > below[i]; j--) order[j] = order[j - 1];
        order[j] = i;
        parts[i] = 0;
    }
    while (width < copies && (width == 0 || (load + volume) / width > below[order[width]]))
        volume += below[order[width++]];
    int64_t level = (load + volume) / width, rest = (load + volume) % width;
    for (int64_t i = 0; i < width; i++) parts[order[i]] = level - below[order[i]] + (i < rest);
}

/* Whole tokens for each copy, in place: who has been rounded down gets the next one. */
static void round_parts(const Split *s, const int64_t *ranks, int64_t *parts, int64_t *owed) {
    int64_t left = s->count;
    for (int64_t c = 0; c < s->copies; c++) {
        owed[ranks[c]] += parts[c] % ONE;
        parts[c] /= ONE;
        left -= parts[c];
    }
    int64_t given[s->copies];
    memset(given, 0, sizeof given);
    for (; left > 0; left--) {
        int64_t best = -1;
        for (int64_t c = 0; c < s->copies; c++)
            if (!given[c] && (best < 0 || owed[ranks[c]] > owed[ranks[best]])) best = c;
        given[best] = 1;
        parts[best]++;
        owed[ranks[best]] -= ONE;
    }
}

/* `experts` [num_pairs] to `chosen` [num_pairs] physical slots. `slots` [num_experts, most]: those of each expert's
 * copies in the first `width` columns, the first one again behind the last. `turn` says with which copy to begin.
 * Returns the first pair whose expert does not exist, else -1.
 */
int64_t step_choice(int64_t num_pairs, const int64_t *experts, int64_t num_experts, int64_t most, int64_t width,
                    const int64_t *slots, int64_t num_ranks, int64_t slots_per_rank, int64_t turn, int64_t *chosen) {
    int64_t counts[num_experts], levels[num_ranks], owed[num_ranks];
    memset(counts, 0, sizeof counts);
    memset(levels, 0, sizeof levels);
    memset(owed, 0, sizeof owed);
    for (int64_t i = 0; i < num_pairs; i++) {
        if (experts[i] < 0 || experts[i] >= num_experts) return i;
        counts[experts[i]]++;
    }
    Split splits[num_experts];
    int64_t split_of[num_experts], num_splits = 0, num_parts = 0;
    for (int64_t e = 0; e < num_experts; e++) {
        if (!counts[e]) continue;
        const int64_t *own = slots + e * most;
        int64_t copies = 1;
        while (copies < width && own[copies] != own[0]) copies++;
        split_of[e] = copies == 1 ? -1 : 0;
        if (copies == 1) levels[own[0] / slots_per_rank] += counts[e] * ONE;
        else splits[num_splits++] = (Split){e, counts[e], copies, 0};
    }
    qsort(splits, num_splits, sizeof(Split), heavier_first);
    for (int64_t s = 0; s < num_splits; s++) {
        split_of[splits[s].expert] = s;
        splits[s].first = num_parts;
        num_parts += splits[s].copies;
    }
    int64_t parts[num_parts + 1], ranks[num_parts + 1], to[num_parts + 1], below[width], poured[width];
    for (int64_t s = 0; s < num_splits; s++) {
        int64_t load = splits[s].count * ONE, copies = splits[s].copies, at = splits[s].first;
        for (int64_t c = 0; c < copies; c++, at++) {
            to[at] = slots[splits[s].expert * most + (c + turn) % copies];
            ranks[at] = to[at] / slots_per_rank;
            parts[at] = load / copies + (c < load % copies);
            levels[ranks[at]] += parts[at];
        }
    }
    for (int round = 0; round < MAX_ROUNDS; round++) {
        int64_t largest = 0;
        for (int64_t s = 0; s < num_splits; s++) {
            int64_t copies = splits[s].copies, *part = parts + splits[s].first, *rank = ranks + splits[s].first;
            for (int64_t c = 0; c < copies; c++) below[c] = levels[rank[c]] - part[c];
            fill(splits[s].count * ONE, copies, below, poured);
            for (int64_t c = 0; c < copies; c++) {
                int64_t change = poured[c] > part[c] ? poured[c] - part[c] : part[c] - poured[c];
                if (change > largest) largest = change;
                levels[rank[c]] += poured[c] - part[c];
                part[c] = poured[c];
            }
        }
        if (largest <= CLOSE) break;
    }
    for (int64_t s = 0; s < num_splits; s++)
        round_parts(splits + s, ranks + splits[s].first, parts + splits[s].first, owed);
    for (int64_t i = 0; i < num_pairs; i++) {
        int64_t e = experts[i], s = split_of[e];
        if (s < 0) {
            chosen[i] = slots[e * most];
            continue;
        }
        while (!parts[splits[s].first]) splits[s].first++; /* the copy that takes the next token */
        parts[splits[s].first]--;
        chosen[i] = to[splits[s].first];
    }
    return -1;
}
