/* PowerSGD's passes M Q and M^T P over a gradient matrix M (n x m), and P Q^T for many columns.
 *
 * P (n x rank) and Q (m x rank) are stored with their columns as rows: P[k] has n numbers, Q[k] has m. Each pass
 * reads M from memory once.
 *
 * This file alone may use fused multiply-adds, which double the speed at high ranks. M Q and M^T P are averaged
 * over ranks before they are used, so their last bits may differ from one processor to another. P Q^T here is made
 * of numbers with so few bits that nothing is rounded, fused or not.
 *
 * One row at a time reaches the speed of copying. Two or four rows together compute faster from the cache, and are
 * 1.7 times slower from memory. M Q and M^T P are as fast as BLAS up to rank 4, and BLAS computes them beyond it.
 */
#if defined(__clang__)
#pragma clang fp contract(fast)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=fast")
#endif
#include "kernels.h"

#define LANES 8
#define FACTORS 4 /* columns of Q that are multiplied together */
typedef float Floats __attribute__((vector_size(4 * LANES)));

INLINE Floats load(const float *from) {
    Floats x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float *to, Floats x) { memcpy(to, &x, sizeof x); }

INLINE float sum_of(Floats x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

/* Add a row's residual to it, if there is one, and write its products with `factors` columns of Q. `factors` is a
 * constant, so that all sums stay in registers. Two sums per factor hide the latency of additions. */
INLINE void row_times(float *row, const float *residual, int64_t m, const float *q, int factors, float *p, int64_t n) {
    Floats sums[FACTORS][2] = {{{0}}};
    float rest[FACTORS] = {0};
    int64_t j = 0;
    for (; j + 2 * LANES <= m; j += 2 * LANES) {
        for (int part = 0; part < 2; part++) {
            int64_t at = j + part * LANES;
            Floats x = load(row + at);
            if (residual) {
                x = x + load(residual + at);
                store(row + at, x);
            }
            for (int k = 0; k < factors; k++) sums[k][part] = sums[k][part] + x * load(q + k * m + at);
        }
    }
    for (; j < m; j++) {
        if (residual) row[j] = row[j] + residual[j];
        for (int k = 0; k < factors; k++) rest[k] = rest[k] + row[j] * q[k * m + j];
    }
    for (int k = 0; k < factors; k++) p[k * n] = sum_of(sums[k][0] + sums[k][1]) + rest[k];
}

#define TIMES(factors) row_times(matrix + i * m, added, m, q + k * m, factors, p + k * n + i, n)

/* M = M + residual (may be NULL), then P = M Q. One row at a time, so that memory is read from start to end. */
CLONES EXPORT void tw_times(float *matrix, const float *residual, int64_t n, int64_t m, int64_t rank, const float *q,
                            float *p) {
    for (int64_t i = 0; i < n; i++) {
        const float *added = residual ? residual + i * m : NULL;
        for (int64_t k = 0; k < rank; k += FACTORS, added = NULL) {
            switch (smaller(rank - k, FACTORS)) {
                case 4: TIMES(4); break;
                case 3: TIMES(3); break;
                case 2: TIMES(2); break;
                default: TIMES(1);
            }
        }
    }
}

/* Add to `factors` columns of Q what one row of M contributes. */
INLINE void add_row(const float *row, int64_t m, const float *p, int64_t n, float *q, int factors) {
    INDEPENDENT
    for (int64_t j = 0; j < m; j++)
        for (int k = 0; k < factors; k++) q[k * m + j] = q[k * m + j] + p[k * n] * row[j];
}

#define ADD_ROW(factors) add_row(matrix + i * m, m, p + k * n + i, n, q + k * m, factors)

/* Q = M^T P. */
CLONES EXPORT void tw_transposed_times(const float *matrix, int64_t n, int64_t m, int64_t rank, const float *p,
                                       float *q) {
    memset(q, 0, (size_t)(rank * m) * sizeof *q);
    for (int64_t i = 0; i < n; i++) {
        for (int64_t k = 0; k < rank; k += FACTORS) {
            switch (smaller(rank - k, FACTORS)) {
                case 4: ADD_ROW(4); break;
                case 3: ADD_ROW(3); break;
                case 2: ADD_ROW(2); break;
                default: ADD_ROW(1);
            }
        }
    }
}

#define WIDE 4
#define COLUMNS 8
typedef double Doubles __attribute__((vector_size(8 * WIDE)));

/* Write `rows` x 8 numbers of P Q^T. `rows` is a constant. */
INLINE void tile(const double *p, const double *q, int64_t n, int64_t m, int64_t rank, int rows, float *product) {
    Doubles sums[4][COLUMNS / WIDE] = {{{0}}};
    for (int64_t k = 0; k < rank; k++) {
        Doubles factor[COLUMNS / WIDE];
        memcpy(factor, q + k * m, sizeof factor);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < COLUMNS / WIDE; j++) sums[i][j] = sums[i][j] + p[k * n + i] * factor[j];
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < COLUMNS; j++) product[i * COLUMNS + j] = (float)sums[i][j / WIDE][j % WIDE];
}

/* The same for any number of rows and columns up to 4 x 8. */
INLINE void small_tile(const double *p, const double *q, int64_t n, int64_t m, int64_t rank, int64_t rows,
                       int64_t columns, float *product) {
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < columns; j++) {
            double sum = 0;
            for (int64_t k = 0; k < rank; k++) sum = sum + p[k * n + i] * q[k * m + j];
            product[i * COLUMNS + j] = (float)sum;
        }
    }
}

/* missed = M - P Q^T unless it is NULL, then M = P Q^T. For any rank. */
CLONES EXPORT void tw_product_exact(float *matrix, float *missed, int64_t n, int64_t m, int64_t rank, const double *p,
                                    const double *q) {
    float product[4 * COLUMNS];
    for (int64_t i = 0; i < n; i += 4) {
        int64_t rows = smaller(4, n - i);
        for (int64_t j = 0; j < m; j += COLUMNS) {
            int64_t columns = smaller(COLUMNS, m - j);
            if (rows == 4 && columns == COLUMNS)
                tile(p + i, q + j, n, m, rank, 4, product);
            else
                small_tile(p + i, q + j, n, m, rank, rows, columns, product);
            for (int64_t row = 0; row < rows; row++) {
                int64_t at = (i + row) * m + j;
                for (int64_t column = 0; column < columns; column++) {
                    float own = product[row * COLUMNS + column];
                    if (missed) missed[at + column] = matrix[at + column] - own;
                    matrix[at + column] = own;
                }
            }
        }
    }
}
