/* One growing, cache-line aligned buffer a thread: working space that outlives a call but belongs to no tensor. */
#ifndef JETTISON_SCRATCH_H
#define JETTISON_SCRATCH_H

#include <stddef.h>
#include <stdlib.h>

#define ROUND_UP(n, to) (((n) + (to)-1) / (to) * (to))

/* Valid until the same thread asks again; NULL when memory is exhausted. */
static void *scratch(size_t bytes) {
    static __thread void *buffer;
    static __thread size_t capacity;
    if (bytes > capacity) {
        free(buffer);
        capacity = ROUND_UP(bytes, (size_t)1 << 16);
        if (posix_memalign(&buffer, 64, capacity) != 0) {
            buffer = NULL;
            capacity = 0;
        }
    }
    return buffer;
}

#endif
