// Algorithm 1 of Rae et al. 2018, with src/fastweights/ops/hebbian/reference.py as its definition.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "inline.hpp"

namespace fastweights {

enum class Counting : std::int32_t { literal, running_mean, constant };  // in the order of reference.COUNTINGS

struct SmoothingProblem {
    std::int64_t classes, tokens, size;  // V, n, d
    double gamma, limit, largest_norm;
    Counting counting;
};

template <class T>
struct SmoothingTensors {
    T* weight;                   // [V,d], in place
    std::int64_t* counts;        // [V], in place
    const T* activations;        // [n,d]
    const std::int64_t* labels;  // [n], each from 0 to V - 1
};

// A label above its token's place: sorted, the tokens of a class stand together and in their order.
constexpr int place_bits = 32;
constexpr std::uint64_t place_mask = (std::uint64_t(1) << place_bits) - 1;

template <class T>
struct Smoothing {
    const SmoothingProblem& problem;
    const SmoothingTensors<T>& tensors;
    const std::uint64_t* const sorted;  // [n]
    T* const mean;                      // [d], scratch

    // Class after class: what is summed stays in the nearest cache, and a row of the weights is read and written once.
    FASTWEIGHTS_INLINE void run() const {
        for (std::int64_t first = 0, last; first < problem.tokens; first = last) {
            const std::uint64_t label = sorted[first] >> place_bits;
            for (last = first + 1; last < problem.tokens && sorted[last] >> place_bits == label;) ++last;
            std::int64_t& count = tensors.counts[label];
            if (static_cast<double>(count) < problem.limit) draw(label, first, last, rate(count, last - first));
            count += last - first;
        }
    }

  private:
    FASTWEIGHTS_INLINE double rate(std::int64_t count, std::int64_t occurrences) const {
        double plain = 0;  // constant
        if (problem.counting == Counting::literal) plain = 1 / double(std::max<std::int64_t>(count, 1));
        if (problem.counting == Counting::running_mean) plain = double(occurrences) / double(count + occurrences);
        return std::max(plain, problem.gamma);
    }

    FASTWEIGHTS_INLINE void draw(std::uint64_t label, std::int64_t first, std::int64_t last, double rate) const {
        const std::int64_t size = problem.size;
        T* const __restrict row = tensors.weight + label * size;
        T* const __restrict sum = mean;
        fetch(row);
        std::fill_n(sum, size, T(0));
        for (std::int64_t i = first; i < last; ++i) {
            fetch(activation(std::min(i + ahead, problem.tokens - 1)));
            const T* const __restrict h = activation(i);
            for (std::int64_t j = 0; j < size; ++j) sum[j] += h[j];
        }
        double square = squares(sum, size), peak = 1;
        if (!std::isfinite(square)) {  // which that of a finite sum may be: of the sum over its largest component
            peak = 0;
            for (std::int64_t j = 0; j < size; ++j) peak = std::max(peak, std::abs(double(sum[j])));
            for (std::int64_t j = 0; j < size; ++j) sum[j] /= peak;
            square = squares(sum, size);
            if (!std::isfinite(square)) return;  // no number among it: the class is left as it is
        }
        // What the sum is multiplied by to be the mean, within the norm.
        const double norm = std::sqrt(square) / (last - first);
        const double bound = norm <= problem.largest_norm / peak ? peak : problem.largest_norm / norm;
        const T share = rate * bound / (last - first), rest = 1 - rate;
        for (std::int64_t j = 0; j < size; ++j) row[j] = share * sum[j] + rest * row[j];
    }

    FASTWEIGHTS_INLINE const T* activation(std::int64_t i) const {
        return tensors.activations + std::int64_t(sorted[i] & place_mask) * problem.size;
    }

    // Rows that lie here and there in memory are asked for some rows ahead, and come as far as the second cache: a fifth
    // less time at d = 256, and none more at 1,024.
    static constexpr std::int64_t ahead = 8;
    FASTWEIGHTS_INLINE void fetch(const T* v) const {
        for (std::int64_t j = 0; j < problem.size; j += 64 / sizeof(T)) __builtin_prefetch(v + j, 0, 2);
    }

    // In float64, in which no float32 squared overflows, though a float64 may; several sums, for the compiler keeps their
    // order.
    static FASTWEIGHTS_INLINE double squares(const T* v, std::int64_t size) {
        constexpr int lanes = 16;
        double sums[lanes] = {};
        std::int64_t j = 0;
        for (; j + lanes <= size; j += lanes)
            for (int k = 0; k < lanes; ++k) sums[k] += double(v[j + k]) * double(v[j + k]);
        for (; j < size; ++j) sums[0] += double(v[j]) * double(v[j]);
        double total = 0;
        for (int k = 0; k < lanes; ++k) total += sums[k];
        return total;
    }
};

}  // namespace fastweights
