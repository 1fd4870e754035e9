/* The positions of the largest magnitudes of each row.
 *
 * Magnitudes are compared by their bits, so NaN is the largest. Of equal magnitudes the first are taken. Positions
 * are written in ascending order. The threshold is found bit by bit, by counting: that vectorises, needs no scratch
 * space and takes the same time for any values.
 */
#include "kernels.h"

INLINE int64_t count_above(const float *x, int64_t n, int32_t threshold) {
    int32_t count = 0; /* a row has fewer than 2^31 numbers */
    for (int64_t i = 0; i < n; i++) count += magnitude_bits(x[i]) > threshold;
    return count;
}

CLONES static void largest_of_row(const float *x, int64_t width, int64_t kept, int64_t *places) {
    int32_t threshold = 0;
    int64_t count = width;
    for (int32_t bit = 1 << 30; bit && count != kept; bit >>= 1) {
        int64_t found = count_above(x, width, (threshold | bit) - 1);
        if (found >= kept) {
            threshold |= bit;
            count = found;
        }
    }
    /* Numbers equal to the threshold fill what the larger ones leave free. */
    int64_t ties = kept - count_above(x, width, threshold);
    for (int64_t i = 0; i < width; i++) {
        int32_t own = magnitude_bits(x[i]);
        if (own > threshold || (own == threshold && ties-- > 0)) *places++ = i;
    }
}

/* 1 <= kept <= width. */
EXPORT void tw_largest(const float *x, int64_t rows, int64_t width, int64_t kept, int64_t *places) {
    for (int64_t row = 0; row < rows; row++) largest_of_row(x + row * width, width, kept, places + row * kept);
}
