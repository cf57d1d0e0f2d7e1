// Vector registers: what can be done with whole ones, and the order of the numbers in them.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "inline.hpp"

namespace fastweights {

template <class T, int Bytes>
struct Registers {
    typedef T V __attribute__((vector_size(Bytes)));
    using Integer = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
    typedef Integer I __attribute__((vector_size(Bytes)));
    static constexpr int width = Bytes / static_cast<int>(sizeof(T));
    static constexpr bool single = sizeof(T) == 4;

    // a / b for b in the middle of what a number can be. In place of a division, which takes about as long as all of tanh
    // around it: a first guess from the bits of b, made twice as exact by each step, and then the quotient's own error
    // taken off.
    static FASTWEIGHTS_INLINE V quotient(V a, V b) {
        if constexpr (!single) {
            return a / b;
        } else {
            V inverse = reinterpret_cast<V>(0x7ef311c3 - reinterpret_cast<I>(b));
            inverse *= T(2) - b * inverse;
            inverse *= T(2) - b * inverse;
            const V rough = a * inverse;
            return rough + (a - rough * b) * inverse;
        }
    }

    // (e^(2|x|) - 1) / (e^(2|x|) + 1), with e^y - 1 = 2^n (e^r - 1) + (2^n - 1) so that nothing cancels near zero.
    static FASTWEIGHTS_INLINE V tanh(V x) {
        constexpr T most = single ? 9.5 : 20;  // where the result rounds to one
        constexpr T log2e = 1.4426950408889634;
        constexpr T ln2_high = single ? 0.693359375 : 0.693145751953125;
        constexpr T ln2_low = single ? -2.12194440e-4 : 1.42860682030941723212e-6;
        // Added to a number below 2^mantissa / 4 it rounds it to an integer, which with the exponent's bias is then in the
        // lowest bits: shifted up, they are a power of two.
        constexpr T round = (single ? 12582912.0 : 6755399441055744.0) + (single ? 127 : 1023);
        const I sign = reinterpret_cast<I>(x) & std::numeric_limits<Integer>::min();
        V y = reinterpret_cast<V>(reinterpret_cast<I>(x) ^ sign);
        y = y > V{} + most ? V{} + most : y;  // in this order NaN stays NaN
        const V shifted = y * (2 * log2e) + round;
        const V n = shifted - round;
        y += y;
        const V r = (y - n * ln2_high) - n * ln2_low;
        V sum = V{} + series.of[series.terms];
        for (int k = series.terms - 1; k >= 2; --k) sum = sum * r + series.of[k];
        const V e = r + r * r * sum;
        const V power = reinterpret_cast<V>(reinterpret_cast<I>(shifted) << (single ? 23 : 52));
        const V whole = power * e + (power - T(1));
        const V result = quotient(whole, whole + T(2));
        return reinterpret_cast<V>(reinterpret_cast<I>(result) ^ sign);
    }

    // e^x for x <= 0; next to nothing where it would be less than a normal number.
    static FASTWEIGHTS_INLINE V exp(V x) {
        constexpr T least = single ? -87 : -708;
        return exp_within(x < V{} + least ? V{} + least : x);  // in this order NaN stays NaN
    }

    // e^x for every x: below the least normal number a subnormal one or zero; infinite from x = 88.4 on, of doubles 709.4.
    static FASTWEIGHTS_INLINE V exp_anywhere(V x) {
        // There the exponent's bits are all zeros, and all ones.
        constexpr T least = single ? -88 : -709, most = single ? 89 : 710;
        x = x < V{} + least ? V{} + least : x;
        return exp_within(x > V{} + most ? V{} + most : x);
    }

    // 1 / (1 + e^-x), and zero where that is less than a normal number: x times it must not come to something for the lowest x.
    static FASTWEIGHTS_INLINE V sigmoid(V x) {
        const V y = exp_anywhere(x < V{} ? x : -x);
        return quotient(x < V{} ? y : V{} + T(1), y + T(1));
    }

    // log(1 + e^x), and x where it is above 20, as torch has it.
    static FASTWEIGHTS_INLINE V softplus(V x) {
        const V y = exp_anywhere(x < V{} ? x : -x);
        // log(1 + y) = 2 artanh(s), for s up to a third.
        const V s = quotient(y, y + T(2)), square = s * s;
        constexpr int terms = single ? 6 : 16;
        V sum = V{} + T(1) / (2 * terms + 1);
        for (int k = terms - 1; k >= 0; --k) sum = sum * square + T(1) / (2 * k + 1);
        return x > V{} + T(20) ? x : (x < V{} ? V{} : x) + T(2) * s * sum;
    }
    static FASTWEIGHTS_INLINE V softplus_slope(V x) { return x > V{} + T(20) ? V{} + T(1) : sigmoid(x); }

    // The first `count` lanes of one register, and the others of another.
    static FASTWEIGHTS_INLINE V select(V first, V others, int count) {
        return lanes(std::make_integer_sequence<Integer, width>{}) < I{} + count ? first : others;
    }

    // The first `count` lanes, and zeros in the others.
    static FASTWEIGHTS_INLINE V head(V v, int count) { return select(v, V{}, count); }

    // The sum of a register's lanes, as a tree, in every lane.
    static FASTWEIGHTS_INLINE V sum(V v) { return sum_from<width / 2>(v); }

    // The greatest of a register's lanes, as a tree, in every lane.
    static FASTWEIGHTS_INLINE V greatest(V v) { return greatest_from<width / 2>(v); }

    // The sums of the lanes of `width` registers, lane l that of register l: half a transposition.
    template <int Step = width / 2>
    static FASTWEIGHTS_INLINE V sums_of(V* v) {
        if constexpr (Step == 0) {
            return v[0];
        } else {
            for (int i = 0; i < Step; ++i) {
                v[i] = folded<Step>(v[i], v[i + Step], std::make_integer_sequence<int, width>{});
            }
            return sums_of<Step / 2>(v);
        }
    }

    // The first part of sums_of, for `Count` registers: lane l has some of what is summed of register l % Count.
    template <int Count>
    static FASTWEIGHTS_INLINE V fold(V* v) {
        if constexpr (Count == 1) {
            return v[0];
        } else {
            constexpr int half = Count / 2;
            for (int i = 0; i < half; ++i)
                v[i] = folded<half>(v[i], v[i + half], std::make_integer_sequence<int, width>{});
            return fold<half>(v);
        }
    }

    // The rest of it: lane l has the sum of all lanes that are `Count` apart from it.
    template <int Count>
    static FASTWEIGHTS_INLINE V sums_over(V v) { return sum_from<width / 2, Count>(v); }

    // Lane i of register j <-> lane j of register i, for `width` registers.
    template <int Step = width / 2>
    static FASTWEIGHTS_INLINE void transpose(V* block) {
        if constexpr (Step > 0) {
            for (int i = 0; i < width; ++i)
                if ((i & Step) == 0)
                    exchange<Step>(block[i], block[i + Step], std::make_integer_sequence<int, width>{});
            transpose<Step / 2>(block);
        }
    }

    // body(i, count) for blocks of `width` numbers: the last one overlaps the one before it rather than being cut
    // short, which costs less than a copy of a number of bytes that the compiler does not know.
    template <class Body>
    static FASTWEIGHTS_INLINE void for_blocks(int size, Body body) {
        if (size < width) {
            body(0, size);
            return;
        }
        for (int i = 0; i < size; i += width) body(i < size - width ? i : size - width, width);
    }

  private:
    // e^x for x whose power of two has an exponent, those of zero and of infinity among them.
    static FASTWEIGHTS_INLINE V exp_within(V x) {
        constexpr T log2e = 1.4426950408889634;
        constexpr T ln2_high = single ? 0.693359375 : 0.693145751953125;
        constexpr T ln2_low = single ? -2.12194440e-4 : 1.42860682030941723212e-6;
        constexpr T round = (single ? 12582912.0 : 6755399441055744.0) + (single ? 127 : 1023);  // as in tanh
        const V shifted = x * log2e + round;
        const V n = shifted - round;
        const V r = (x - n * ln2_high) - n * ln2_low;
        V sum = V{} + series.of[series.terms];
        for (int k = series.terms - 1; k >= 0; --k) sum = sum * r + series.of[k];
        return sum * reinterpret_cast<V>(reinterpret_cast<I>(shifted) << (single ? 23 : 52));
    }

    template <Integer... Lane>
    static FASTWEIGHTS_INLINE I lanes(std::integer_sequence<Integer, Lane...>) {
        return I{Lane...};
    }
    template <int Step, int... I>
    static FASTWEIGHTS_INLINE void exchange(V& x, V& y, std::integer_sequence<int, I...>) {
        const V low = __builtin_shufflevector(x, y, (I & Step ? width + I - Step : I)...);
        const V high = __builtin_shufflevector(x, y, (I & Step ? width + I : I + Step)...);
        x = low;
        y = high;
    }
    // Lanes that differ by Step, added up: those of x where a lane's number has no Step in it, those of y where it has. The
    // first shuffle leaves every number in its lane, which is no work for the one port that moves them across.
    template <int Step, int... I>
    static FASTWEIGHTS_INLINE V folded(V x, V y, std::integer_sequence<int, I...>) {
        return __builtin_shufflevector(x, y, (I & Step ? width + I : I)...) +
               __builtin_shufflevector(x, y, (I & Step ? width + I - Step : I + Step)...);
    }
    template <int Step, int Least = 1>
    static FASTWEIGHTS_INLINE V sum_from(V v) {
        if constexpr (Step < Least) return v;
        else return sum_from<Step / 2, Least>(v + swapped<Step>(v, std::make_integer_sequence<int, width>{}));
    }
    template <int Step>
    static FASTWEIGHTS_INLINE V greatest_from(V v) {
        if constexpr (Step == 0) {
            return v;
        } else {
            const V other = swapped<Step>(v, std::make_integer_sequence<int, width>{});
            return greatest_from<Step / 2>(other > v ? other : v);
        }
    }
    template <int Step, int... I>
    static FASTWEIGHTS_INLINE V swapped(V v, std::integer_sequence<int, I...>) {
        return __builtin_shufflevector(v, v, (I ^ Step)...);
    }
    // e^r = 1 + r + ..., for r up to half of log 2. Of floats, the polynomial with the least error, 4e-9, one term shorter
    // than Taylor's. A table: clang would compute a function's values as the program runs.
    struct Series {
        static constexpr int terms = single ? 6 : 13;
        T of[14] = {1, 1, T(0.4999999345), T(0.1666652069), T(0.04166838737), T(0.008368709911), T(0.001381461321)};
        constexpr Series() {
            if (single) return;
            T factorial = 1;
            for (int n = 2; n < 14; ++n) of[n] = T(1) / (factorial *= T(n));
        }
    };
    static constexpr Series series{};
};

}  // namespace fastweights
