/* Small integers packed into bytes, and ascending positions in the Elias-Fano code. Lowest bits come first.
 *
 * A row of positions is the lower bits of each, packed, and then a bit vector in which the i-th one stands at the
 * upper bits of the i-th position, plus i. 64 positions out of 4096 take 8 bits each instead of 12 (the entropy is
 * 7.4), and the length depends on the counts alone, so that layouts stay static.
 */
#include "kernels.h"

INLINE void pack_row(const int64_t *numbers, int64_t count, int64_t bits, uint8_t *into) {
    uint64_t waiting = 0;
    int64_t filled = 0, mask = ((int64_t)1 << bits) - 1;
    for (int64_t i = 0; i < count; i++) {
        waiting |= (uint64_t)(numbers[i] & mask) << filled;
        for (filled += bits; filled >= 8; filled -= 8, waiting >>= 8) *into++ = (uint8_t)waiting;
    }
    if (filled) *into = (uint8_t)waiting;
}

INLINE void unpack_row(const uint8_t *packed, int64_t count, int64_t bits, int64_t *numbers) {
    uint64_t waiting = 0, mask = ((uint64_t)1 << bits) - 1;
    int64_t filled = 0;
    for (int64_t i = 0; i < count; i++, waiting >>= bits, filled -= bits) {
        for (; filled < bits; filled += 8) waiting |= (uint64_t)*packed++ << filled;
        numbers[i] = (int64_t)(waiting & mask);
    }
}

INLINE int64_t bytes_of(int64_t bits) { return (bits + 7) / 8; }

/* The lowest `bits` bits, at most 32, of each number. */
EXPORT void tw_pack(const int64_t *numbers, int64_t rows, int64_t count, int64_t bits, uint8_t *into) {
    int64_t bytes = bytes_of(count * bits);
    for (int64_t row = 0; row < rows; row++) pack_row(numbers + row * count, count, bits, into + row * bytes);
}

EXPORT void tw_unpack(const uint8_t *packed, int64_t rows, int64_t count, int64_t bits, int64_t *numbers) {
    int64_t bytes = bytes_of(count * bits);
    for (int64_t row = 0; row < rows; row++) unpack_row(packed + row * bytes, count, bits, numbers + row * count);
}

/* `bits` of each position are stored as they are. `ones` is the length of the bit vector. */
EXPORT void tw_pack_positions(const int64_t *places, int64_t rows, int64_t kept, int64_t bits, int64_t ones,
                              uint8_t *into) {
    int64_t lower = bytes_of(kept * bits), upper = bytes_of(ones);
    for (int64_t row = 0; row < rows; row++, places += kept, into += lower + upper) {
        if (bits) pack_row(places, kept, bits, into);
        memset(into + lower, 0, (size_t)upper);
        for (int64_t i = 0; i < kept; i++) {
            int64_t at = (places[i] >> bits) + i;
            into[lower + at / 8] |= (uint8_t)(1 << at % 8);
        }
    }
}

/* Bits after the `kept`-th one are ignored. Where there are fewer ones, which no encoder writes, positions are 0. */
EXPORT void tw_unpack_positions(const uint8_t *packed, int64_t rows, int64_t kept, int64_t bits, int64_t ones,
                                int64_t *places) {
    int64_t lower = bytes_of(kept * bits), upper = bytes_of(ones);
    for (int64_t row = 0; row < rows; row++, places += kept, packed += lower + upper) {
        memset(places, 0, (size_t)kept * sizeof *places);
        if (bits) unpack_row(packed, kept, bits, places);
        int64_t found = 0;
        for (int64_t at = 0; at < ones && found < kept; at++) {
            if (packed[lower + at / 8] >> at % 8 & 1) {
                places[found] += (at - found) << bits;
                found++;
            }
        }
    }
}
