/* Finiteness checks, alone or as a by-product of scaling.
 *
 * Infinity and NaN have the largest magnitudes as integers, so a maximum of bits finds them. A sum would also
 * overflow for huge finite numbers. */
#include "kernels.h"

CLONES EXPORT int32_t tw_finite(const float *x, int64_t n) { return largest_magnitude(x, n) < INFINITE; }

/* Multiply in place. Return whether all products are finite. */
CLONES EXPORT int32_t tw_scale_finite(float *x, int64_t n, float factor) {
    int32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        float scaled = x[i] * factor;
        x[i] = scaled;
        int32_t own = magnitude_bits(scaled);
        most = own > most ? own : most;
    }
    return most < INFINITE;
}
