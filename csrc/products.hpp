// Small matrix products, in tiles of registers: numbers of the left matrix times registers of the right one.
#pragma once

#include <cstdint>

#include "columns.hpp"

namespace fastweights {

// y <- a b, or y += a b. The right matrix and the result are rows of whole registers; the left one has any strides, so
// that a transpose, or rows and columns counted from the last, are the same product.
template <class T>
struct Product {
    enum Kind {
        whole,
        lower,  // a is lower triangular: what lies above its diagonal is not read, and meets no NaN of b
        solve,  // y <- (I + a)^-1 y, a strictly lower triangular; there is no b
    };
    Kind kind;
    int rows, columns, inner;  // columns: padded; inner: of `whole`, the others have `rows`
    const T* a;
    std::int64_t a_row, a_column;
    const T* b;
    std::int64_t b_pitch;
    T* y;
    std::int64_t y_pitch;
    bool add;
    bool below = false;  // what lies above the diagonal of y is not wanted; some of it stays as it was
};

template <class T, int Bytes>
struct Multiplier {
    using C = Columns<T, Bytes>;
    using V = typename C::V;
    static constexpr int width = C::width;
    static constexpr int most_rows = Bytes == 64 ? 8 : 6;  // two registers wide, as many as are held at once

    static FASTWEIGHTS_OUTLINE void run(const Product<T>& p) {
        switch (p.kind) {
            case Product<T>::whole: return run_kind<Product<T>::whole>(p);
            case Product<T>::lower: return run_kind<Product<T>::lower>(p);
            case Product<T>::solve: return run_kind<Product<T>::solve>(p);
        }
    }

    template <int Kind>
    static FASTWEIGHTS_OUTLINE void run_kind(const Product<T>& p) {
        C::template for_panels<2>(p.columns, [&](int j, auto block) FASTWEIGHTS_INLINE_LAMBDA {
            for_rows<most_rows>(p.rows, p.below ? j : 0, [&](int i, auto rows) FASTWEIGHTS_INLINE_LAMBDA {
                tile<Kind, rows, block>(p, i, j);
            });
        });
    }

  private:
    // In tiles of few rows each sum waits for its last addition: eight rows are two tiles of four, not six and two.
    template <int Rows, class Body>
    static FASTWEIGHTS_INLINE void for_rows(int count, int i, Body body) {
        for (; i + Rows <= count && !(Rows == 6 && count - i == 8); i += Rows) body(i, std::integral_constant<int, Rows>{});
        if constexpr (Rows > 1) for_rows<(Rows > 4 ? 4 : 1)>(count, i, body);
    }

    template <int Kind, int Rows, int Block>
    static FASTWEIGHTS_INLINE void tile(const Product<T>& p, int i, int j) {
        constexpr bool solves = Kind == Product<T>::solve;
        const std::int64_t a_row = p.a_row, a_column = p.a_column;
        const std::int64_t b_pitch = solves ? p.y_pitch : p.b_pitch;
        const T* a = p.a + i * a_row;
        const T* b = (solves ? p.y : p.b) + j;
        T* const y = p.y + i * p.y_pitch + j;
        V sum[Rows][Block];
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
            for (int k = 0; k < Block; ++k) {
                sum[r][k] = V{};
                if (solves) sum[r][k] = -C::load(y + r * p.y_pitch + k * width);
                else if (p.add) sum[r][k] = C::load(y + r * p.y_pitch + k * width);
            }
        const int count = Kind == Product<T>::whole ? p.inner : i;
        for (int n = 0; n < count; ++n, a += a_column, b += b_pitch) {
            V right[Block];
#pragma GCC unroll 8
            for (int k = 0; k < Block; ++k) right[k] = C::load(b + k * width);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
                for (int k = 0; k < Block; ++k) sum[r][k] += right[k] * a[r * a_row];
        }
        if constexpr (Kind != Product<T>::whole) {
#pragma GCC unroll 8
            for (int n = 0; n < Rows; ++n) {
#pragma GCC unroll 8
                for (int k = 0; k < Block; ++k) {
                    if (solves) sum[n][k] = -sum[n][k];
                    const V right = solves ? sum[n][k] : C::load(b + n * b_pitch + k * width);
#pragma GCC unroll 8
                    for (int r = n + solves; r < Rows; ++r) sum[r][k] += right * a[r * a_row + n * a_column];
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
            for (int k = 0; k < Block; ++k) C::store(sum[r][k], y + r * p.y_pitch + k * width);
    }
};

}  // namespace fastweights
