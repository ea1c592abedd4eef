/* The pool of pool.h. All state of a region is in one word: how many helpers may join, items, and the next of them.
 *
 * A helper draws an item first and reads what to do with it then: once it has one, the region cannot end before it has
 * said that the item is done. So a helper that comes late draws nothing, or an item of the region that is on by then.
 */
#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#define ITEM_BITS 24
#define ITEM_MASK ((uint64_t)POOL_MOST_ITEMS)
#define MOST_HELPERS 255

#define LOOK_LONG_NS 200000 /* more than what Python does between two kernels of a step */
#define LOOK_SHORT_NS 5000
#define SHORT_FOR 256 /* regions for which helpers look shortly after one of them was missed */

#define EXPORT __attribute__((visibility("default")))

static struct {
    uint64_t word __attribute__((aligned(64)));     /* helpers << 48 | items << 24 | next */
    uint32_t num_done __attribute__((aligned(64))); /* items of the region that are done */
    int is_awaited;                                 /* the caller sleeps until they all are */
    PoolBody *body __attribute__((aligned(64)));
    void *arguments;
    int num_sleeping;
    int short_for;
    int is_taken;
    int num_helpers;
    pthread_mutex_t mutex;
    pthread_cond_t begun, done;
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER, .begun = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int has_item(uint64_t word, long helper) {
    return (word & ITEM_MASK) < (word >> ITEM_BITS & ITEM_MASK) && helper < (long)(word >> (2 * ITEM_BITS));
}

/* An item of the region that is on, for a helper (the caller is none: -1), or -1. */
static long draw_shared(long helper) {
    uint64_t word = __atomic_load_n(&pool.word, __ATOMIC_SEQ_CST);
    while (has_item(word, helper))
        if (__atomic_compare_exchange_n(&pool.word, &word, word + 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return (long)(word & ITEM_MASK);
    return -1;
}

long jettison_pool_next(Draw *draw) {
    long item = draw->drawn;
    if (item >= 0) {
        draw->drawn = -1;
        return item;
    }
    if (!draw->is_shared) return draw->next < draw->num_items ? draw->next++ : -1;
    item = draw_shared(-1);
    draw->num_drawn += item >= 0;
    return item;
}

/* These many items are done; the caller reads what they wrote afterwards. */
static void tell_done(uint32_t count) {
    __atomic_add_fetch(&pool.num_done, count, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.is_awaited, __ATOMIC_SEQ_CST)) {
        pthread_mutex_lock(&pool.mutex);
        pthread_cond_signal(&pool.done);
        pthread_mutex_unlock(&pool.mutex);
    }
}

static void *help(void *number) {
    const long helper = (long)(intptr_t)number;
    for (;;) {
        long item = draw_shared(helper);
        if (item < 0) {
            const int64_t until_ns =
                now_ns() + (__atomic_load_n(&pool.short_for, __ATOMIC_RELAXED) > 0 ? LOOK_SHORT_NS : LOOK_LONG_NS);
            do {
                for (int i = 0; i < 16 && item < 0; i++) {
                    relax();
                    if (has_item(__atomic_load_n(&pool.word, __ATOMIC_RELAXED), helper)) item = draw_shared(helper);
                }
            } while (item < 0 && now_ns() < until_ns);
        }
        if (item < 0) {
            pthread_mutex_lock(&pool.mutex);
            __atomic_add_fetch(&pool.num_sleeping, 1, __ATOMIC_SEQ_CST);
            while ((item = draw_shared(helper)) < 0) pthread_cond_wait(&pool.begun, &pool.mutex);
            __atomic_sub_fetch(&pool.num_sleeping, 1, __ATOMIC_SEQ_CST);
            pthread_mutex_unlock(&pool.mutex);
        }
        Draw draw = {.drawn = item, .num_drawn = 1, .is_shared = 1};
        pool.body(pool.arguments, &draw);
        tell_done(draw.num_drawn);
    }
    return NULL;
}

/* A child of a fork has the caller's thread alone. */
static void forget_helpers(void) {
    pool.word = 0;
    pool.num_helpers = pool.num_sleeping = pool.is_taken = pool.is_awaited = 0;
    pool.mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool.begun = pool.done = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
}

/* As many helpers as can be had, up to `wanted`. The pool is the caller's. Signals are for other threads. */
static int helpers(int wanted) {
    static int is_prepared;
    if (!is_prepared) is_prepared = pthread_atfork(NULL, NULL, forget_helpers) == 0;
    if (!is_prepared) return 0;
    sigset_t all, before;
    if (pool.num_helpers < wanted && sigfillset(&all) == 0 && pthread_sigmask(SIG_BLOCK, &all, &before) == 0) {
        pthread_t thread;
        while (pool.num_helpers < wanted &&
               pthread_create(&thread, NULL, help, (void *)(intptr_t)pool.num_helpers) == 0) {
            pthread_detach(thread);
            pool.num_helpers++;
        }
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    return pool.num_helpers < wanted ? pool.num_helpers : wanted;
}

/* Items that helpers have drawn are on their way, unless one of them has lost its core. */
static void await(uint32_t num_items) {
    int missed = 0;
    if (__atomic_load_n(&pool.num_done, __ATOMIC_SEQ_CST) != num_items) {
        const int64_t until_ns = now_ns() + LOOK_LONG_NS;
        do {
            for (int i = 0; i < 16; i++) relax();
            missed = now_ns() >= until_ns;
        } while (__atomic_load_n(&pool.num_done, __ATOMIC_SEQ_CST) != num_items && !missed);
    }
    if (__atomic_load_n(&pool.num_done, __ATOMIC_SEQ_CST) == num_items) {
        if (pool.short_for > 0) __atomic_sub_fetch(&pool.short_for, 1, __ATOMIC_RELAXED);
        return;
    }
    __atomic_store_n(&pool.short_for, SHORT_FOR, __ATOMIC_RELAXED);
    pthread_mutex_lock(&pool.mutex);
    __atomic_store_n(&pool.is_awaited, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&pool.num_done, __ATOMIC_SEQ_CST) != num_items) pthread_cond_wait(&pool.done, &pool.mutex);
    __atomic_store_n(&pool.is_awaited, 0, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&pool.mutex);
}

void jettison_pool_run(int num_threads, long num_items, PoolBody *body, void *arguments) {
    int num_helpers = num_threads - 1 < num_items - 1 ? num_threads - 1 : (int)num_items - 1;
    num_helpers = num_helpers > MOST_HELPERS ? MOST_HELPERS : num_helpers;
    int is_free = 0;
    if (num_helpers > 0 && num_items <= POOL_MOST_ITEMS &&
        __atomic_compare_exchange_n(&pool.is_taken, &is_free, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
        num_helpers = helpers(num_helpers);
        pool.body = body;
        pool.arguments = arguments;
        __atomic_store_n(&pool.num_done, 0, __ATOMIC_SEQ_CST);
        __atomic_store_n(&pool.word, (uint64_t)num_helpers << (2 * ITEM_BITS) | (uint64_t)num_items << ITEM_BITS,
                         __ATOMIC_SEQ_CST);
        if (__atomic_load_n(&pool.num_sleeping, __ATOMIC_SEQ_CST)) {
            pthread_mutex_lock(&pool.mutex);
            pthread_cond_broadcast(&pool.begun);
            pthread_mutex_unlock(&pool.mutex);
        }
        Draw draw = {.drawn = -1, .is_shared = 1};
        body(arguments, &draw);
        __atomic_add_fetch(&pool.num_done, draw.num_drawn, __ATOMIC_SEQ_CST);
        await((uint32_t)num_items);
        __atomic_store_n(&pool.is_taken, 0, __ATOMIC_RELEASE);
        return;
    }
    Draw draw = {.drawn = -1, .num_items = num_items};
    body(arguments, &draw);
}

/* For tests: draw `num_items` items and count in seen[] who got which; what is drawn twice shows. */
static void mark(void *seen, Draw *draw) {
    for (long item; (item = jettison_pool_next(draw)) >= 0;)
        __atomic_add_fetch((int32_t *)seen + item, 1, __ATOMIC_RELAXED);
}
EXPORT void jettison_pool_mark(int num_threads, long num_items, int32_t *seen) {
    jettison_pool_run(num_threads, num_items, mark, seen);
}
