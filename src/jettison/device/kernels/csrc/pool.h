/* One pool of threads for all kernels of a process.
 *
 * A region is a number of items that threads draw from a shared counter until none is left: who is slow, or has lost
 * its core to another process, draws fewer. The caller takes part, and `pool_run` returns when every item is done.
 * Helpers look for the next region for a while before they sleep: a layer's regions follow each other within
 * microseconds, and waking a sleeper costs more than one of them. Where a helper was seen to have lost its core, they
 * look only shortly: a core that looks is taken for one that computes, and loses its turn when it has work.
 */
#ifndef JETTISON_POOL_H
#define JETTISON_POOL_H

#include <stdint.h>

#define POOL_MOST_ITEMS ((1L << 24) - 1) /* of a region */

/* What a thread draws from; its own. */
typedef struct {
    long drawn;           /* an item that was drawn before the body began, or -1 */
    long next, num_items; /* where nobody helps */
    uint32_t num_drawn;
    int is_shared;
} Draw;

/* Draws with `pool_next` until that is negative; every thread of a region runs it once. */
typedef void PoolBody(void *arguments, Draw *draw);

/* At most `num_threads` threads, the caller among them; alone where the pool works for another caller. */
void jettison_pool_run(int num_threads, long num_items, PoolBody *body, void *arguments);

/* The next item of the thread's region, or -1. */
long jettison_pool_next(Draw *draw);

#endif
