// A softmax that adapts to the neighbours of each position of a stream, as
// src/fastweights/ops/stream/reference.py defines it. Entries lie in a ring of rows, position i of the stream in
// row i modulo their number.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "inline.hpp"
#include "registers.hpp"

namespace fastweights {

struct PredictProblem {
    std::int64_t positions, classes, rows, first;  // T, V, the rows of what is stored, and the first that is written
};

template <class T, class Stored>
struct PredictTensors {
    T* logits;            // [T,V]; overwritten
    T* normalisers;       // [T], log of the sum of exp
    Stored* predictions;  // [parts,rows,classes of a part]
};

struct FindProblem {
    std::int64_t positions, rows, first, neighbours, size;  // T queries in rows from `first` on, K, d
    std::int64_t seen, capacity, bias, threads;             // `seen` positions went before the first query
    std::int64_t relative;                                  // the rate is in units of the neighbours' squared length
    double rate, epsilon, close;
    double rounding;  // of a product, relative to the lengths of its keys
    double slack;     // of a query's length: distances that differ by less are equal
};

template <class T>
struct FindTensors {
    const T* products;           // [T,rows]
    const T* keys;               // [rows,d]
    const T* lengths;            // [rows], squared
    const std::int64_t* labels;  // [rows]
    std::int32_t* offsets;       // [T,K], of the neighbours' rows in a part, in bytes
    T* pulls;                    // [T,K]
    std::uint64_t* ordered;      // [T,K], a label above its neighbour's place, ascending
    std::int32_t* counts;        // [T], of neighbours
};

struct AdaptProblem {
    std::int64_t positions, classes, rows, first, neighbours, threads;
};

template <class T, class Stored>
struct AdaptTensors {
    const std::int64_t* labels;    // [rows]
    const Stored* predictions;     // [parts,rows,classes of a part]
    const std::int32_t* offsets;   // as find gives them
    const T* pulls;
    const std::uint64_t* ordered;
    const std::int32_t* counts;
    T* changes;                    // [T]: what log p of the query's own label gains; where it is rounded, log p itself
};

struct SubtractProblem {
    std::int64_t positions, classes, rows, neighbours, threads;
    std::int64_t width;  // classes of a part: those of a line of the processor's caches, or of four lines
};

template <class T, class Stored>
struct SubtractTensors {
    const Stored* predictions;    // [parts,rows,classes of a part]
    const std::int64_t* nearest;  // [T,K], rows
    const T* pulls;               // [T,K]; of 0 the row is not read
    T* outputs;                   // [T,V]
};

template <class T>
struct FindScratch {
    T* squares;                // [rows]
    double* exact;             // [rows], of candidates
    double* sorted;            // [rows]
    std::uint32_t* buckets;    // [find_buckets]
    std::int32_t* near;        // [rows + 1]
    std::int32_t* candidates;  // [rows + 1]
};

template <class T>
struct AdaptScratch {
    std::int32_t* next;  // [T], of the labels
    T* most;             // [T], of the changes
    T* sums;             // [T], of p exp(change - most)
    T* wholes;           // [T], of p, which is 1 but for its rounding
    T* of_target;        // [T]
};

constexpr int find_buckets = 1024;  // of distances, in which the nearest are counted

// How probabilities are stored. An entry's row in a part of the classes is a line of the caches.
template <class T, class Stored, int Bytes>
struct Rows {
    using R = Registers<T, Bytes>;
    using V = typename R::V;
    static constexpr int classes = 64 / sizeof(T), width = R::width, registers = classes / width;

    static FASTWEIGHTS_INLINE void read(const T* row, V* values) {
        for (int j = 0; j < registers; ++j) std::memcpy(values + j, row + j * width, sizeof(V));  // into registers
    }
    static FASTWEIGHTS_INLINE void write(T* row, const V* values) { std::memcpy(row, values, sizeof(V) * registers); }
};

// In 16 bits, the upper half of a float32. Two share a word, class i and class i + 16 of the part: the upper one is read
// with the lower one's bits behind its own, and is rounded so that this is nearest.
template <int Bytes>
struct Rows<float, std::uint16_t, Bytes> {
    using R = Registers<float, Bytes>;
    using V = typename R::V;
    using I = typename R::I;
    static constexpr int classes = 32, width = R::width, registers = classes / width;

    static FASTWEIGHTS_INLINE void read(const std::uint16_t* row, V* values) {
        for (int j = 0; j < registers / 2; ++j) {
            I words;
            std::memcpy(&words, row + 2 * j * width, sizeof(I));
            values[j] = reinterpret_cast<V>(words << 16);
            values[j + registers / 2] = reinterpret_cast<V>(words);
        }
    }
    static FASTWEIGHTS_INLINE void write(std::uint16_t* row, const V* values) {
        for (int j = 0; j < registers / 2; ++j) {
            const I low = (reinterpret_cast<I>(values[j]) + 0x8000) >> 16;
            const I rest = reinterpret_cast<I>(values[j + registers / 2]) + 0x8000 - low;
            const I words = ((rest < 0 ? I{} : rest) & ~0xffff) | low;
            std::memcpy(row + 2 * j * width, &words, sizeof(I));
        }
    }
};

// The softmax of logits, and its place in what is stored.
template <class T, class Stored, int Bytes>
struct Prediction {
    using Part = Rows<T, Stored, Bytes>;
    using R = typename Part::R;
    using V = typename Part::V;
    static constexpr int width = R::width;

    const PredictProblem& p;
    const PredictTensors<T, Stored>& t;

    FASTWEIGHTS_INLINE void run() const {
        constexpr int tile = 64;  // positions read side by side: so many pages are known at once
        for (std::int64_t first = 0; first < p.positions; first += tile) {
            const std::int64_t count = std::min<std::int64_t>(tile, p.positions - first);
            T scale[tile];
            for (std::int64_t i = 0; i < count; ++i)
                scale[i] = 1 / exponentiate(t.logits + (first + i) * p.classes, t.normalisers[first + i]);
            const std::int64_t parts = (p.classes + Part::classes - 1) / Part::classes;
            for (std::int64_t part = 0; part < parts; ++part) {
                const std::int64_t begin = part * Part::classes;
                const std::int64_t classes = std::min<std::int64_t>(Part::classes, p.classes - begin);
                Stored* out = t.predictions + (part * p.rows + p.first + first) * Part::classes;
                for (std::int64_t i = 0; i < count; ++i, out += Part::classes) {
                    const T* const in = t.logits + (first + i) * p.classes + begin;
                    V values[Part::registers] = {};
                    std::memcpy(values, in, sizeof(T) * (classes == Part::classes ? Part::classes : classes));
                    for (V& value : values) value *= scale[i];
                    Part::write(out, values);
                }
            }
        }
    }

  private:
    // exp(z - max) in place; returns the sum, and its logarithm with the maximum in `normaliser`.
    FASTWEIGHTS_INLINE T exponentiate(T* row, T& normaliser) const {
        const std::int64_t n = p.classes;
        V high[2], sum[2] = {};
        for (V& v : high) v = V{} - std::numeric_limits<T>::infinity();
        T most = -std::numeric_limits<T>::infinity(), total = 0;
        std::int64_t j = 0;
        for (; j + 2 * width <= n; j += 2 * width)
            for (int i = 0; i < 2; ++i) {
                const V v = load(row + j + i * width);
                high[i] = v > high[i] ? v : high[i];
            }
        for (; j < n; ++j) most = std::max(most, row[j]);
        most = std::max(most, R::greatest(high[0] > high[1] ? high[0] : high[1])[0]);
        for (j = 0; j + 2 * width <= n; j += 2 * width)
            for (int i = 0; i < 2; ++i) {
                const V v = R::exp(load(row + j + i * width) - most);
                std::memcpy(row + j + i * width, &v, sizeof(V));
                sum[i] += v;
            }
        for (; j < n; ++j) total += row[j] = std::exp(row[j] - most);
        total += R::sum(sum[0] + sum[1])[0];
        normaliser = most + std::log(total);
        return total;
    }
    static FASTWEIGHTS_INLINE V load(const T* p) {
        V v;
        std::memcpy(&v, p, sizeof(V));
        return v;
    }
};

// The neighbours of each query, and how much they pull.
template <class T>
struct Search {
    const FindProblem& p;
    const FindTensors<T>& t;
    const FindScratch<T>& s;
    const std::int64_t first, count;  // of the queries

    FASTWEIGHTS_INLINE void run() const {
        for (std::int64_t q = first; q < first + count; ++q) find(q);
    }

  private:
    FASTWEIGHTS_INLINE void find(std::int64_t q) const {
        const std::int64_t own = p.first + q, visible = std::min(p.seen + q, p.capacity);
        const T* const products = t.products + q * p.rows;
        const T length = t.lengths[own];
        // The rows before its own, and those before these at the end of the ring.
        const std::int64_t before = std::min(visible, own), wrapped = visible - before;
        T least = std::numeric_limits<T>::infinity(), most = 0;
        measure(products, length, own - before, own, least, most);
        measure(products, length, p.rows - wrapped, p.rows, least, most);
        const auto each = [&](auto take) FASTWEIGHTS_INLINE_LAMBDA {  // the oldest first
            for (std::int64_t r = p.rows - wrapped; r < p.rows; ++r) take(r);
            for (std::int64_t r = own - before; r < own; ++r) take(r);
        };
        std::int64_t chosen = 0;
        if (visible <= p.neighbours) {
            each([&](std::int64_t r) FASTWEIGHTS_INLINE_LAMBDA { s.near[chosen++] = r; });
        } else {
            const double last = find_last(each, least, most);
            // Of these bounds what is below is among the nearest, and what is above is not, whatever rounding did.
            const double query = std::sqrt(double(length)), slack = p.slack * query;
            const double error = p.rounding * (2 * query + std::sqrt(last)) * (2 * query + std::sqrt(last));
            const double high = square(std::sqrt(last + error) + 2 * slack) + error;
            const double low = square(std::max(std::sqrt(std::max(last - error, 0.0)) - 2 * slack, 0.0)) - error;
            std::int64_t unsure = 0;
            each([&](std::int64_t r) FASTWEIGHTS_INLINE_LAMBDA {
                s.near[chosen] = s.candidates[unsure] = r;
                chosen += s.squares[r] < low;
                unsure += s.squares[r] >= low && s.squares[r] <= high;
            });
            chosen = settle(own, chosen, unsure, slack);
        }
        weigh(q, own, chosen, products, length);
    }

    // The squared distance of the last of the nearest, as the products have it.
    template <class Each>
    FASTWEIGHTS_INLINE T find_last(Each each, T least, T most) const {
        const T spread = most - least, scale = spread > T(1e-30) ? find_buckets * T(0.999) / spread : 0;
        const auto bucket = [&](std::int64_t r)
                                FASTWEIGHTS_INLINE_LAMBDA { return int((s.squares[r] - least) * scale); };
        std::fill_n(s.buckets, find_buckets, 0);
        each([&](std::int64_t r) FASTWEIGHTS_INLINE_LAMBDA { ++s.buckets[bucket(r)]; });
        std::int64_t sure = 0, unsure = 0;
        int last = 0;
        for (; sure + s.buckets[last] < p.neighbours; ++last) sure += s.buckets[last];
        each([&](std::int64_t r) FASTWEIGHTS_INLINE_LAMBDA {
            s.candidates[unsure] = r;
            unsure += bucket(r) == last;
        });
        const auto nearer = [&](std::int32_t x, std::int32_t y) { return s.squares[x] < s.squares[y]; };
        std::int32_t* const place = s.candidates + (p.neighbours - sure - 1);
        std::nth_element(s.candidates, place, s.candidates + unsure, nearer);
        return s.squares[*place];
    }

    // Adds to the `chosen` so many of the candidates, the oldest first, that there are K; returns how many there are.
    // Their distances are measured by difference, which gives equal keys equal ones, and those that differ by less than
    // the slack are equal.
    FASTWEIGHTS_INLINE std::int64_t settle(std::int64_t own, std::int64_t chosen, std::int64_t unsure,
                                           double slack) const {
        const std::int64_t wanted = p.neighbours - chosen;
        double low = 0, high = std::numeric_limits<double>::infinity();
        if (unsure > wanted) {
            for (std::int64_t i = 0; i < unsure; ++i) {
                const T *const key = t.keys + s.candidates[i] * p.size, *const query = t.keys + own * p.size;
                double sum = 0;
                for (std::int64_t j = 0; j < p.size; ++j) sum += square(double(key[j]) - double(query[j]));
                s.sorted[i] = s.exact[i] = sum;
            }
            std::nth_element(s.sorted, s.sorted + wanted - 1, s.sorted + unsure);
            const double last = std::sqrt(s.sorted[wanted - 1]);
            low = square(std::max(last - slack, 0.0)), high = square(last + slack);
        }
        std::int64_t ties = 0;
        for (std::int64_t i = 0; i < unsure; ++i) {
            if (unsure <= wanted || s.exact[i] < low) s.near[chosen++] = s.candidates[i];
            else if (s.exact[i] <= high) s.candidates[ties++] = s.candidates[i];
        }
        for (std::int64_t i = 0; chosen < p.neighbours; ++i) s.near[chosen++] = s.candidates[i];
        return chosen;
    }

    static FASTWEIGHTS_INLINE double square(double x) { return x * x; }

    FASTWEIGHTS_INLINE void measure(const T* products, T length, std::int64_t begin, std::int64_t end, T& least,
                                    T& most) const {
        T low = least, high = most;
        for (std::int64_t r = begin; r < end; ++r) {
            const T square = std::max(t.lengths[r] + length - 2 * products[r], T(0));
            s.squares[r] = square;
            low = std::min(low, square);
            high = std::max(high, square);
        }
        least = low, most = high;
    }

    FASTWEIGHTS_INLINE void weigh(std::int64_t q, std::int64_t own, std::int64_t chosen, const T* products,
                                  T length) const {
        std::int32_t* const offset = t.offsets + q * p.neighbours;
        T* const pull = t.pulls + q * p.neighbours;
        std::uint64_t* const label = t.ordered + q * p.neighbours;
        T total = 0;
        for (std::int64_t k = 0; k < chosen; ++k) {
            const std::int64_t r = s.near[k];
            T square = s.squares[r];
            if (square < T(p.close) * length) {  // where rounding is much of what a product leaves
                const T *const key = t.keys + r * p.size, *const query = t.keys + own * p.size;
                square = 0;
                for (std::int64_t j = 0; j < p.size; ++j) square += (key[j] - query[j]) * (key[j] - query[j]);
            }
            const T weight = 1 / (T(p.epsilon) + square);
            total += p.relative ? weight * (t.lengths[r] + T(p.bias)) : weight;
            pull[k] = weight * (products[r] + T(p.bias));
            offset[k] = r * 64;
            label[k] = std::uint64_t(t.labels[r]) << 32 | std::uint64_t(k);
        }
        const T factor = T(p.rate) / std::max(total, std::numeric_limits<T>::min());
        for (std::int64_t k = 0; k < chosen; ++k) pull[k] *= factor;
        std::sort(label, label + chosen);
        t.counts[q] = chosen;
    }
};

// The softmax of each query after its neighbours' pull. A part of the classes of all entries stays in the second cache
// while every query takes its own from it.
template <class T, class Stored, int Bytes>
struct Adaptation {
    using Part = Rows<T, Stored, Bytes>;
    using R = typename Part::R;
    using V = typename Part::V;
    static constexpr int registers = Part::registers;
    // So many sums that additions, four cycles each and two at once, need not wait for one another.
    static constexpr int chains = registers < 8 ? 8 / registers : 1;
    // What was rounded is what adapts, or the probabilities of all labels would not add up to one.
    static constexpr bool rounded = sizeof(Stored) < sizeof(T);
    static constexpr T least = std::numeric_limits<T>::min();

    const AdaptProblem& p;
    const AdaptTensors<T, Stored>& t;
    const AdaptScratch<T>& s;
    const std::int64_t first, count;  // of the queries

    FASTWEIGHTS_INLINE void run() const {
        for (std::int64_t i = 0; i < count; ++i) s.next[i] = 0, s.most[i] = 0, s.sums[i] = 0, s.of_target[i] = 0, s.wholes[i] = 0;
        const std::int64_t parts = (p.classes + Part::classes - 1) / Part::classes;
        for (std::int64_t part = 0; part < parts; ++part)
            for (std::int64_t i = 0; i < count; ++i) adapt(i, part);
        for (std::int64_t i = 0; i < count; ++i) {
            const T whole = rounded ? T(1) : s.wholes[i];
            t.changes[first + i] = s.of_target[i] - s.most[i] - std::log(std::max(s.sums[i], T(1e-37)) / whole);
        }
    }

  private:
    FASTWEIGHTS_INLINE void adapt(std::int64_t i, std::int64_t part) const {
        const std::int64_t q = first + i, own = p.first + q;
        const std::int32_t* const offset = t.offsets + q * p.neighbours;
        const T* const pull = t.pulls + q * p.neighbours;
        const std::uint64_t* const label = t.ordered + q * p.neighbours;
        const Stored* const rows = t.predictions + part * p.rows * Part::classes;
        const int n = t.counts[q];
        V sum[chains][registers] = {}, row[registers];
        int k = 0;
        for (; k + chains <= n; k += chains)
            for (int c = 0; c < chains; ++c) add(rows, offset[k + c], pull[k + c], sum[c]);
        for (; k < n; ++k) add(rows, offset[k], pull[k], sum[0]);
        for (int c = 1; c < chains; ++c)
            for (int j = 0; j < registers; ++j) sum[0][j] += sum[c][j];
        alignas(64) T change[Part::classes];
        for (V& v : sum[0]) v = -v;
        std::memcpy(change, sum[0], sizeof(change));
        const std::uint64_t begin = part * Part::classes, end = begin + Part::classes;
        std::int32_t next = s.next[i];
        for (; next < n && label[next] >> 32 < end; ++next)
            change[(label[next] >> 32) - begin] += pull[std::uint32_t(label[next])];
        s.next[i] = next;
        Part::read(rows + own * Part::classes, row);
        const std::uint64_t target = t.labels[own];
        if (target >= begin && target < end) {
            T before[Part::classes];
            std::memcpy(before, row, sizeof(before));
            s.of_target[i] = change[target - begin];
            if (rounded) s.of_target[i] += std::log(std::max(before[target - begin], least));
        }
        std::memcpy(sum[0], change, sizeof(change));
        V high = sum[0][0];
        for (int j = 1; j < registers; ++j) high = sum[0][j] > high ? sum[0][j] : high;
        const T peak = std::max(s.most[i], R::greatest(high)[0]);
        if (peak > s.most[i]) s.sums[i] *= std::exp(s.most[i] - peak), s.most[i] = peak;
        V total = V{}, whole = V{};
        for (int j = 0; j < registers; ++j) total += row[j] * R::exp(sum[0][j] - peak), whole += row[j];
        s.sums[i] += R::sum(total)[0];
        s.wholes[i] += R::sum(whole)[0];
    }

    static FASTWEIGHTS_INLINE void add(const Stored* rows, std::int32_t offset, T pull, V* sum) {
        V row[registers];
        Part::read(reinterpret_cast<const Stored*>(reinterpret_cast<const char*>(rows) + offset), row);
        for (int j = 0; j < registers; ++j) sum[j] += row[j] * pull;
    }
};

// All outputs of a query, less what is stored of its neighbours.
template <class T, class Stored, int Bytes>
struct Subtraction {
    using Part = Rows<T, Stored, Bytes>;
    using V = typename Part::V;

    const SubtractProblem& p;
    const SubtractTensors<T, Stored>& t;
    const std::int64_t first, count;  // of the queries

    FASTWEIGHTS_INLINE void run() const {
        const std::int64_t parts = (p.classes + p.width - 1) / p.width;
        for (std::int64_t part = 0; part < parts; ++part)
            for (std::int64_t q = first; q < first + count; ++q)
                p.width == Part::classes ? subtract<1>(q, part) : subtract<4>(q, part);
    }

  private:
    template <int Lines>
    FASTWEIGHTS_INLINE void subtract(std::int64_t q, std::int64_t part) const {
        constexpr int width = Lines * Part::classes;
        const Stored* const rows = t.predictions + part * p.rows * width;
        V sum[Lines][Part::registers] = {}, line[Part::registers];
        for (std::int64_t k = q * p.neighbours; k < (q + 1) * p.neighbours; ++k) {
            const T pull = t.pulls[k];
            if (pull == 0) continue;
            for (int i = 0; i < Lines; ++i) {
                Part::read(rows + t.nearest[k] * width + i * Part::classes, line);
                for (int j = 0; j < Part::registers; ++j) sum[i][j] += line[j] * pull;
            }
        }
        T change[width];
        std::memcpy(change, sum, sizeof(change));
        const std::int64_t begin = part * width, classes = std::min<std::int64_t>(width, p.classes - begin);
        T* const out = t.outputs + q * p.classes + begin;
        for (std::int64_t j = 0; j < classes; ++j) out[j] -= change[j];
    }
};

}  // namespace fastweights
