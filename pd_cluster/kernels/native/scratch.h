/* Working memory of a thread: one range for each purpose, kept from call to call and freed when the thread ends. */
#pragma once

#include <stddef.h>

typedef enum {
    NORMED,
    PROJECTED,
    QUERIES,
    LATENTS,
    ATTENDED,
    HIDDEN,
    SUMS,
    TASKS,
    KEYS,
    VALUES,
    ROWS_SUM,
    EXPANDED,
    ROUTED,
    PAIRS,
    AHEAD,
    NUM_PURPOSES
} Purpose;

/* At least `bytes` of memory, aligned to 64, with anything in it. */
void *scratch(Purpose purpose, size_t bytes);
