#include "scratch.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct {
    void *memory[NUM_PURPOSES];
    size_t bytes[NUM_PURPOSES];
} Ranges;

static pthread_key_t key;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Thread_local Ranges *ranges;

static void free_ranges(void *of_thread) {
    Ranges *r = of_thread;
    for (int i = 0; i < NUM_PURPOSES; i++) free(r->memory[i]);
    free(r);
}

static void make_key(void) { pthread_key_create(&key, free_ranges); }

static void *checked(void *memory, size_t bytes) {
    if (memory) return memory;
    fprintf(stderr, "out of memory: a step needs %zu bytes of working memory\n", bytes);
    abort();
}

void *scratch(Purpose purpose, size_t bytes) {
    if (!ranges) {
        pthread_once(&once, make_key);
        ranges = checked(calloc(1, sizeof(Ranges)), sizeof(Ranges));
        pthread_setspecific(key, ranges);
    }
    if (ranges->bytes[purpose] < bytes) {
        free(ranges->memory[purpose]);
        size_t grown = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        ranges->memory[purpose] = checked(aligned_alloc(4096, grown), grown);
        ranges->bytes[purpose] = grown;
    }
    return ranges->memory[purpose];
}
