/* Runs every kernel under AddressSanitizer and UndefinedBehaviorSanitizer: `make sanitize`.
 *
 * Buffers have exactly the size that a kernel may touch, lengths and blocks are awkward, and values include all that is
 * not a plain number. Results are compared in Python, by the property tests.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels.h"

typedef struct {
    int64_t count;
    const int64_t *lengths;
    float *const *values, *const *residuals, *const *errors;
    float keep;
} Pieces;

void tw_encode(int32_t, int64_t, const Pieces *, float *, uint8_t *, float *);
void tw_mean_encode(int32_t, int64_t, const Pieces *, int64_t, int64_t, const float *const *, const uint8_t *const *,
                    float *, uint8_t *, float *);
void tw_decode(int32_t, int64_t, int64_t, const int64_t *, float *const *, const float *, const uint8_t *);
void tw_add(int32_t, int64_t, int64_t, const int64_t *, float *const *, const float *, const uint8_t *, float);
int32_t tw_finite(const float *, int64_t);
void tw_largest(const float *, int64_t, int64_t, int64_t, int64_t *);
void tw_pack(const int64_t *, int64_t, int64_t, int64_t, uint8_t *);
void tw_unpack(const uint8_t *, int64_t, int64_t, int64_t, int64_t *);
void tw_pack_positions(const int64_t *, int64_t, int64_t, int64_t, int64_t, uint8_t *);
void tw_unpack_positions(const uint8_t *, int64_t, int64_t, int64_t, int64_t, int64_t *);
void tw_times(float *, const float *, int64_t, int64_t, int64_t, const float *, float *);
void tw_transposed_times(const float *, int64_t, int64_t, int64_t, const float *, float *);
void tw_product_few(float *, float *, int64_t, int64_t, int64_t, const float *, const float *);
void tw_product_exact(float *, float *, int64_t, int64_t, int64_t, const double *, const double *);

static uint32_t state = 1;

static uint32_t chance(uint32_t below) {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) % below;
}

static void *room(int64_t bytes) {
    void *made = malloc(bytes > 0 ? (size_t)bytes : 1);
    if (!made) abort();
    return made;
}

static float *numbers(int64_t n) {
    static const float special[] = {0.0f, -0.0f, 1e-45f, 1e-38f, 3.4e38f, -3.4e38f, INFINITY, -INFINITY, NAN};
    float *made = room(n * (int64_t)sizeof(float));
    for (int64_t i = 0; i < n; i++)
        made[i] = chance(40) ? (float)chance(2000) / 100.0f - 10.0f : special[chance(sizeof special / sizeof *special)];
    return made;
}

static void blocks(int32_t kind, int64_t bits, int64_t width) {
    int64_t lengths[3] = {chance(700), 0, 1 + chance(40)}, count = 0;
    float *values[3], *residuals[3], *errors[3];
    for (int i = 0; i < 3; i++) {
        values[i] = numbers(lengths[i]), residuals[i] = numbers(lengths[i]), errors[i] = numbers(lengths[i]);
        count += (lengths[i] + width - 1) / width;
    }
    float *scales = numbers(count), *other_scales = numbers(count), *scratch = numbers(4 * width);
    uint8_t *codes = room(count * width * bits / 8), *other_codes = room(count * width * bits / 8);
    for (int form = 0; form < 6; form++) {
        Pieces all = {3, lengths, values, form & 1 ? residuals : NULL,
                      form / 2 == 0 ? NULL : form / 2 == 1 ? errors : values, 0.5f};
        tw_encode(kind, width, &all, other_scales, other_codes, scratch);
        const float *received_scales[] = {other_scales, other_scales};
        const uint8_t *received_codes[] = {other_codes, other_codes};
        tw_mean_encode(kind, width, &all, 1, 3, received_scales, received_codes, scales, codes, scratch);
        tw_decode(kind, width, 3, lengths, errors, scales, codes);
        tw_add(kind, width, 3, lengths, errors, scales, codes, -0.3f);
    }
    for (int i = 0; i < 3; i++) free(values[i]), free(residuals[i]), free(errors[i]);
    free(scales), free(other_scales), free(scratch), free(codes), free(other_codes);
}

/* Three rows of positions there and back, as positions and as integers of 9 bits. */
static void packed(const int64_t *places, int64_t kept, int64_t width, int64_t bits) {
    int64_t ones = kept + ((width - 1) >> bits), lower = (kept * bits + 7) / 8, plain = (kept * 9 + 7) / 8;
    uint8_t *codes = room(3 * (lower + (ones + 7) / 8)), *integers = room(3 * plain);
    int64_t *back = room(3 * kept * (int64_t)sizeof *back);
    tw_pack_positions(places, 3, kept, bits, ones, codes);
    tw_unpack_positions(codes, 3, kept, bits, ones, back);
    for (int64_t i = 0; i < 3 * kept; i++)
        if (back[i] != places[i]) abort();
    tw_pack(places, 3, kept, 9, integers);
    tw_unpack(integers, 3, kept, 9, back);
    for (int64_t i = 0; i < 3 * kept; i++)
        if (back[i] != places[i]) abort();
    free(codes), free(integers), free(back);
}

static void rows(int64_t width) {
    int64_t kept = 1 + chance((uint32_t)width), *places = room(3 * kept * (int64_t)sizeof(int64_t));
    float *x = numbers(3 * width);
    if (chance(2)) memset(x, 0xff, (size_t)(3 * width) * sizeof *x); /* NaNs with every bit set, all tied */
    tw_largest(x, 3, width, kept, places);
    for (int64_t i = 0; i < 3 * kept; i++)
        if (places[i] < 0 || places[i] >= width || (i % kept && places[i] <= places[i - 1])) abort();
    for (int64_t bits = 0; bits < 10; bits++) packed(places, kept, width, bits);
    (void)tw_finite(x, 3 * width);
    free(x), free(places);
}

static void matrices(int64_t n, int64_t m, int64_t rank) {
    float *matrix = numbers(n * m), *other = numbers(n * m), *p = numbers(rank * n), *q = numbers(rank * m);
    double *wide_p = room(rank * n * (int64_t)sizeof(double)), *wide_q = room(rank * m * (int64_t)sizeof(double));
    for (int64_t i = 0; i < rank * n; i++) wide_p[i] = p[i];
    for (int64_t i = 0; i < rank * m; i++) wide_q[i] = q[i];
    for (int form = 0; form < 2; form++) {
        float *extra = form ? other : NULL;
        tw_times(matrix, extra, n, m, rank, q, p);
        tw_transposed_times(matrix, n, m, rank, p, q);
        if (rank <= 4) tw_product_few(matrix, extra, n, m, rank, p, q);
        tw_product_exact(matrix, extra, n, m, rank, wide_p, wide_q);
    }
    free(matrix), free(other), free(p), free(q), free(wide_p), free(wide_q);
}

int main(void) {
    static const int64_t bits[] = {8, 4, 1, 8, 8, 2}, widths[] = {8, 24, 64, 200, 256, 1000};
    for (int round = 0; round < 40; round++) {
        for (int kind = 0; kind < 6; kind++)
            for (int i = 0; i < 6; i++) blocks(kind, bits[kind], widths[i]);
        rows(1 + chance(300));
        matrices(1 + chance(20), 1 + chance(40), 1 + chance(33));
    }
    puts("all kernels ran clean");
    return 0;
}
