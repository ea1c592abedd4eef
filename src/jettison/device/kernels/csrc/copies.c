/* Copies rows of bytes, piece by piece, on a thread that holds no lock of the caller's.
 *
 * state[0] counts the bytes that have been copied, in the order of the rows, and says where to begin; state[1] is set
 * by another thread to stop between two pieces. No piece begins at or beyond byte `until`, and none crosses a row.
 */
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT void jettison_copy_rows(char *const *targets, const char *const *sources, long num_rows, long row_bytes,
                               long piece_bytes, long until, int64_t *state) {
    const int64_t total = (int64_t)num_rows * row_bytes;
    int64_t done = state[0];
    while (done < total && done < until && !__atomic_load_n(&state[1], __ATOMIC_ACQUIRE)) {
        const int64_t row = done / row_bytes, offset = done % row_bytes, left = row_bytes - offset;
        const int64_t size = left < piece_bytes ? left : piece_bytes;
        memcpy(targets[row] + offset, sources[row] + offset, (size_t)size);
        done += size;
        __atomic_store_n(&state[0], done, __ATOMIC_RELEASE);
    }
}
