// The recurrent delta rule, with src/fastweights/ops/recurrent_delta/reference.py as its definition.
//
//     [z; q; k; v; a; b] = drive + weight h,   q and k silu and of length one, v silu, a and b sigmoid, for each head
//     m = v - a M^T k,   M <- a M + k (b m)^T,   h <- relu(gain LN(z + M^T q) + bias)
//
// Of the drive a convolution over the last steps may be taken before: C taps for each of its 4 H + 2 N rows.
//
// A thread takes a team of sequences, whose products with the weight are one product of matrices; their memories stay in the
// cache. The forward pass keeps the memory before each chunk of steps, and the backward pass makes none of the others again:
// a memory within a chunk is the one before it, faded, and the few vectors written since.
//
// Vectors of H numbers are laid out head by head, each padded with zeros to whole registers: a row of products is
// [z; q; k; v], four such vectors, and [a; b], padded together.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "arena.hpp"
#include "products.hpp"

namespace fastweights {

struct RecurrentDeltaProblem {
    std::int64_t steps, batch, size, heads;
    std::int64_t taken;  // C, the steps that the convolution reads; 0 without one
    double eps;  // of the layer norm
};

template <class T>
struct RecurrentDeltaInputs {
    const T* drive;                // [T,B,4H+2N]
    const T* weight;               // [4H+2N,H]
    const T *gain, *bias;          // [H]
    const T* hidden;               // [B,H]
    const T* memory;               // [B,N,W,W], W = H/N
    const T *taps, *shift;         // [4H+2N,C], [4H+2N], of the convolution; null without one
    const T* last;                 // [B,C-1,4H+2N], the drive before the first step
    const std::int64_t* lengths;   // [B], or null
    const bool* starts;            // [T,B], or null
};

template <class T>
struct RecurrentDeltaResults {
    T* outputs;  // [T,B,H]
    T* memory;   // [B,N,W,W]
    T* inside;   // what a step keeps for the backward pass, [B,T,...], or null
    T* kept;     // the memory before each chunk, [B,chunks,N,W,padded W], or null
};

// What a step of nn.DeltaFastWeightsRNN has around the recurrence: the products of its inputs.
template <class T>
struct RecurrentDeltaStep {
    std::int64_t features;   // D
    const T* x;              // [B,D]
    const T *weight, *bias;  // [4H+2N,D], [4H+2N]; the second may be null
    T* drive;                // [B,4H+2N]: scratch
    T* hidden;               // [B,H]: the outputs once more
    T* after;                // [B,C-1,4H+2N]: `last` of the next step
};

template <class T>
struct RecurrentDeltaGradients {
    T* drive;         // [T,B,4H+2N]
    T* products;      // [T,B,4H+2N], behind the convolution; null without one, where they are the drive's
    T *gain, *bias;   // [B,H], to be summed over the sequences
    T *hidden, *memory;
    T *taps, *shift;  // [B,C,4H+2N], [B,4H+2N], to be summed over the sequences
    T* last;          // [B,C-1,4H+2N]
};

constexpr std::int64_t recurrent_delta_chunk = 16;
// A step reads the weight once for a team. As long as the weight stays in a core's own cache, of 2 MiB where this was measured, a
// few sequences are best, whose memories stay there too; a larger one comes from further away, and more share a reading.
constexpr std::int64_t few_in_delta_team = 4, most_in_delta_team = 16, cached_weight_bytes = 2 << 20;
constexpr double shortest_key = 1e-12;  // as torch.nn.functional.normalize has it

// One team of sequences, at each level: recurrent_delta_level.cpp.
#define FASTWEIGHTS_VARIANT(T, NAME, TARGET, BYTES)                                                                      \
    void recurrent_delta_forward_##NAME(const RecurrentDeltaProblem& p, const RecurrentDeltaInputs<T>& in,               \
                                        std::int64_t from, std::int64_t end, const RecurrentDeltaResults<T>& out);       \
    void recurrent_delta_step_##NAME(const RecurrentDeltaProblem& p, const RecurrentDeltaInputs<T>& in,                  \
                                     const RecurrentDeltaStep<T>& step, std::int64_t from, std::int64_t end,             \
                                     const RecurrentDeltaResults<T>& out);                                               \
    void recurrent_delta_backward_##NAME(const RecurrentDeltaProblem& p, const RecurrentDeltaInputs<T>& in,              \
                                         std::int64_t from, std::int64_t end, const RecurrentDeltaResults<T>& kept,      \
                                         const T* grad_outputs, const T* grad_memory,                                    \
                                         const RecurrentDeltaGradients<T>& out);
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, float)
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, double)
#undef FASTWEIGHTS_VARIANT

template <class T, int Bytes>
struct RecurrentDeltaTeam {
    using C = Columns<T, Bytes>;
    using R = typename C::R;
    using V = typename C::V;
    using P = Product<T>;
    static constexpr int width = C::width;

    const RecurrentDeltaProblem& p;
    const RecurrentDeltaInputs<T>& in;
    const std::int64_t from, count;       // sequences
    const int heads, part, wide;          // N, W, W padded
    const int size, gates, row;           // H padded, 2 N padded, and a row of products
    const std::int64_t numbers, matrices; // of a row of the drive; of a memory
    const std::int64_t chunks;
    Arena arena;
    T *columns, *gain, *bias;             // [H,row], [H]
    T *hidden, *mixed, *memory;           // [team,H], [team,inside], [team,N,W,padded W]
    T *taps, *shift, *recent;             // [C,row], [row], [team,C-1,row]: what the convolution still reads, by t modulo C-1
    T* read;                              // [H]: M^T q

    // What a step keeps: its products, of which the normalised sum takes the place of z, then m, then the factor that made the
    // sum normal.
    static std::int64_t inside_numbers(const RecurrentDeltaProblem& p) {
        return 5 * p.heads * C::padded(p.size / p.heads) + C::padded(2 * p.heads) + width;
    }
    FASTWEIGHTS_INLINE T* missing_of(T* inside) const { return inside + row; }
    FASTWEIGHTS_INLINE const T* missing_of(const T* inside) const { return inside + row; }

    // What is written and read in a step: q, k and v, a and b; then the lengths of q and k before they were one, and the
    // sigmoids in the SiLU.
    struct Step {
        T *q, *k, *v, *gates, *lengths, *silu;
    };
    FASTWEIGHTS_INLINE std::int64_t step_numbers() const { return 6 * size + 2 * gates; }
    FASTWEIGHTS_INLINE Step step_at(T* start) const {
        T* const gate = start + 3 * size;
        return {start, start + size, start + 2 * size, gate, gate + gates, gate + 2 * gates};
    }

    RecurrentDeltaTeam(const RecurrentDeltaProblem& problem, const RecurrentDeltaInputs<T>& inputs, std::int64_t begin,
                       std::int64_t end, std::int64_t more_numbers = 0)
        : p(problem), in(inputs), from(begin), count(end - begin), heads(static_cast<int>(p.heads)),
          part(static_cast<int>(p.size / p.heads)), wide(static_cast<int>(C::padded(part))), size(heads * wide),
          gates(static_cast<int>(C::padded(2 * heads))), row(4 * size + gates), numbers(4 * p.size + 2 * p.heads),
          matrices(std::int64_t(heads) * part * wide), chunks((p.steps + recurrent_delta_chunk - 1) / recurrent_delta_chunk),
          arena((std::int64_t(size) * row + 3 * size + count * (size + inside_numbers(p) + matrices) + step_numbers() +
                 row * (p.taken + 1 + count * p.taken) + more_numbers) *
                sizeof(T)) {
        gain = take(size);
        bias = take(size);
        hidden = take(count * size);
        mixed = take(count * inside_numbers(p));
        memory = take(count * matrices);
        read = take(size);
        spread(in.gain, gain);
        spread(in.bias, bias);
        if (!p.taken) return;
        taps = take(p.taken * row);
        shift = take(row);
        recent = take(count * (p.taken - 1) * row);
        for (std::int64_t unit = 0; unit < numbers; ++unit) {
            const int at = row_place(unit);
            for (std::int64_t i = 0; i < p.taken; ++i) taps[i * row + at] = in.taps[unit * p.taken + i];
            if (in.shift) shift[at] = in.shift[unit];
        }
        if (!in.last) return;
        for (std::int64_t s = 0; s < count; ++s)
            for (std::int64_t i = 0; i < p.taken - 1; ++i) spread_row(last_of(s, i), recent_of(s, i));
    }

    FASTWEIGHTS_INLINE void forward(const RecurrentDeltaResults<T>& out) {
        const Step now = step_at(take(step_numbers()));
        // To turn the weight around takes longer than to read it once.
        const bool once = p.steps == 1 && wide == part;
        if (!once) turn_weight();
        for (std::int64_t s = 0; s < count; ++s) {
            spread(in.hidden + (from + s) * p.size, hidden + s * size);
            load_memory(in.memory + (from + s) * heads * part * part, memory + s * matrices);
        }
        const std::int64_t pitch = out.inside ? p.steps * inside_numbers(p) : inside_numbers(p);
        for (std::int64_t t = 0; t < p.steps; ++t) {
            T* const inside = out.inside ? inside_at(out.inside, 0, t) : mixed;
            for (std::int64_t s = 0; s < count; ++s) {
                if (out.kept && t % recurrent_delta_chunk == 0)
                    std::copy_n(memory + s * matrices, matrices, kept_at(out.kept, s, t));
                if (t < length(s) && anew(t, s)) {
                    std::fill_n(hidden + s * size, size, T(0));
                    std::fill_n(memory + s * matrices, matrices, T(0));
                    if (p.taken) std::fill_n(recent_of(s, 0), (p.taken - 1) * row, T(0));
                }
                spread_row(in.drive + (t * p.batch + from + s) * numbers, inside + s * pitch);
                if (p.taken) convolve(s, t, inside + s * pitch);
                if (t + 1 < p.steps) C::prefetch(in.drive + ((t + 1) * p.batch + from + s) * numbers, static_cast<int>(numbers));
            }
            if (once)
                for (std::int64_t s = 0; s < count; ++s)
                    C::multiply_rows(in.weight, hidden + s * size, static_cast<int>(numbers), size, T(1), inside + s * pitch);
            else multiply(count, row, size, hidden, size, columns, row, inside, pitch, true);
            for (std::int64_t s = 0; s < count; ++s) {
                T* const outputs = out.outputs + (t * p.batch + from + s) * p.size;
                if (t >= length(s)) {
                    std::fill_n(outputs, p.size, T(0));
                    continue;
                }
                run_step(inside + s * pitch, now, memory + s * matrices, hidden + s * size);
                gather(hidden + s * size, outputs);
            }
        }
        for (std::int64_t s = 0; s < count; ++s)
            store_memory(memory + s * matrices, out.memory + (from + s) * heads * part * part);
    }

    // One step, from the inputs themselves: `in.drive` is `step.drive`.
    FASTWEIGHTS_INLINE void step(const RecurrentDeltaStep<T>& step, const RecurrentDeltaResults<T>& out) {
        T* const products = take(C::padded(numbers));
        const std::int64_t kept = p.taken ? (p.taken - 1) * numbers : 0;
        for (std::int64_t s = from; s < from + count; ++s) {
            if (step.bias) C::copy(step.bias, static_cast<int>(numbers), products);
            else std::fill_n(products, numbers, T(0));
            add_products(step.weight, step.x + s * step.features, static_cast<int>(step.features), products);
            C::copy(products, static_cast<int>(numbers), step.drive + s * numbers);
            if (!kept) continue;
            T* const after = step.after + s * kept;
            std::copy_n(in.last + s * kept + numbers, kept - numbers, after);
            std::copy_n(products, numbers, after + kept - numbers);
        }
        forward(out);
        std::copy_n(out.outputs + from * p.size, count * p.size, step.hidden + from * p.size);
    }
    static std::int64_t step_numbers_of(const RecurrentDeltaProblem& p) { return C::padded(4 * p.size + 2 * p.heads); }

  protected:
    FASTWEIGHTS_INLINE T* recent_of(std::int64_t s, std::int64_t place) const {
        return recent + (s * (p.taken - 1) + place) * row;
    }
    FASTWEIGHTS_INLINE const T* last_of(std::int64_t s, std::int64_t place) const {
        return in.last + ((from + s) * (p.taken - 1) + place) * numbers;
    }

    // A step's drive becomes what the convolution makes of it, and is kept for the next ones.
    FASTWEIGHTS_OUTLINE void convolve(std::int64_t s, std::int64_t t, T* x) const {
        const std::int64_t before = p.taken - 1;
        if (!before) {
            C::fill(row, x, [&](int j) FASTWEIGHTS_INLINE_LAMBDA {
                return C::load(x + j) * C::load(taps + j) + C::load(shift + j);
            });
            return;
        }
        T* const newest = recent_of(s, t % before);  // where the oldest is, which is read here for the last time
        const T* const own = taps + before * row;
        C::fill(row, x, [&](int j) FASTWEIGHTS_INLINE_LAMBDA {
            const V now = C::load(x + j), oldest = C::load(newest + j);
            C::store(now, newest + j);
            return now * C::load(own + j) + oldest * C::load(taps + j) + C::load(shift + j);
        });
        for (std::int64_t i = 1; i < before; ++i) {
            const T *const tap = taps + i * row, *const source = recent_of(s, (t + i) % before);
            C::fill(row, x, [&](int j) FASTWEIGHTS_INLINE_LAMBDA {
                return C::load(x + j) + C::load(tap + j) * C::load(source + j);
            });
        }
    }

    // y += M x for a matrix [4H+2N,D] whose rows need not fill registers.
    FASTWEIGHTS_OUTLINE void add_products(const T* matrix, const T* x, int columns, T* y) const {
        const int rows = static_cast<int>(numbers), whole = columns / width * width;
        if (whole == columns) return C::multiply_rows(matrix, x, rows, columns, T(1), y);
        for (int i = 0; i < rows; ++i) {
            const T* const row = matrix + std::int64_t(i) * columns;
            T sum = C::sum_of(whole, [&](int j) FASTWEIGHTS_INLINE_LAMBDA { return C::load(row + j) * C::load(x + j); })[0];
            for (int j = whole; j < columns; ++j) sum += row[j] * x[j];
            y[i] += sum;
        }
    }

    FASTWEIGHTS_INLINE T* take(std::int64_t count) { return arena.template take_zeroed<T>(count); }
    FASTWEIGHTS_INLINE int place(std::int64_t unit) const { return static_cast<int>(unit / part * wide + unit % part); }
    FASTWEIGHTS_INLINE int row_place(std::int64_t i) const {
        if (i < 4 * p.size) return static_cast<int>(i / p.size) * size + place(i % p.size);
        i -= 4 * p.size;
        return 4 * size + static_cast<int>(i);
    }
    FASTWEIGHTS_INLINE std::int64_t length(std::int64_t s) const { return in.lengths ? in.lengths[from + s] : p.steps; }
    FASTWEIGHTS_INLINE bool anew(std::int64_t t, std::int64_t s) const {
        return in.starts && in.starts[t * p.batch + from + s];
    }
    FASTWEIGHTS_INLINE T* inside_at(T* inside, std::int64_t s, std::int64_t t) const {
        return inside + ((from + s) * p.steps + t) * inside_numbers(p);
    }
    FASTWEIGHTS_INLINE T* kept_at(T* kept, std::int64_t s, std::int64_t t) const {
        return kept + ((from + s) * chunks + t / recurrent_delta_chunk) * matrices;
    }

    FASTWEIGHTS_OUTLINE void turn_weight() {
        columns = take(std::int64_t(size) * row);
        for (std::int64_t i = 0; i < numbers; ++i) {
            T* const to = columns + row_place(i);
            const T* const from_row = in.weight + i * p.size;
            for (int n = 0; n < heads; ++n)
                for (int j = 0; j < part; ++j) to[std::int64_t(n * wide + j) * row] = from_row[n * part + j];
        }
    }

    // Between H numbers and their padded place.
    FASTWEIGHTS_OUTLINE void spread(const T* source, T* to) const {
        if (wide == part) return C::copy(source, size, to);
        for (int n = 0; n < heads; ++n) {
            C::copy(source + n * part, part, to + n * wide);
            std::fill(to + n * wide + part, to + (n + 1) * wide, T(0));
        }
    }
    FASTWEIGHTS_OUTLINE void gather(const T* source, T* to) const {
        if (wide == part) return C::copy(source, size, to);
        for (int n = 0; n < heads; ++n) C::copy(source + n * wide, part, to + n * part);
    }
    FASTWEIGHTS_OUTLINE void spread_row(const T* source, T* to) const {
        std::fill_n(to + 4 * size, gates, T(0));
        if (wide == part) return C::copy(source, static_cast<int>(numbers), to);
        for (int i = 0; i < 4; ++i) spread(source + i * p.size, to + i * size);
        C::copy(source + 4 * p.size, 2 * heads, to + 4 * size);
    }
    FASTWEIGHTS_OUTLINE void gather_row(const T* source, T* to) const {
        if (wide == part) return C::copy(source, static_cast<int>(numbers), to);
        for (int i = 0; i < 4; ++i) gather(source + i * size, to + i * p.size);
        C::copy(source + 4 * size, 2 * heads, to + 4 * p.size);
    }
    FASTWEIGHTS_OUTLINE void load_memory(const T* source, T* to) const {
        for (int i = 0; i < heads * part; ++i) {
            C::copy(source + i * part, part, to + i * wide);
            std::fill(to + i * wide + part, to + (i + 1) * wide, T(0));
        }
    }
    FASTWEIGHTS_OUTLINE void store_memory(const T* source, T* to) const {
        for (int i = 0; i < heads * part; ++i) C::copy(source + i * wide, part, to + i * part);
    }

    // y <- a b, or y += a b.
    FASTWEIGHTS_INLINE void multiply(std::int64_t rows, int across, int inner, const T* a, std::int64_t a_pitch, const T* b,
                                     std::int64_t b_pitch, T* y, std::int64_t y_pitch, bool add) const {
        Multiplier<T, Bytes>::run(
            {P::whole, static_cast<int>(rows), across, inner, a, a_pitch, 1, b, b_pitch, y, y_pitch, add});
    }

    // From the products of q, k, v, a and b to what is written and read.
    FASTWEIGHTS_OUTLINE void activate(const T* products, const Step& now) const {
        C::fill(3 * size, now.q, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            const V x = C::load(products + i), gate = R::sigmoid(x);
            C::store(gate, now.silu + i);
            return x * gate;
        });
        C::fill(gates, now.gates, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            return R::sigmoid(C::load(products + 3 * size + i));
        });
        for (int i = 0; i < 2; ++i)
            for (int n = 0; n < heads; ++n) {
                T* const vector = now.q + i * size + n * wide;
                const T squares =
                    C::sum_of(part, [&](int j) FASTWEIGHTS_INLINE_LAMBDA { return C::load(vector + j) * C::load(vector + j); })[0];
                const T length = std::max(std::sqrt(squares), T(shortest_key));
                now.lengths[i * heads + n] = length;
                C::fill(wide, vector, [&](int j) FASTWEIGHTS_INLINE_LAMBDA { return C::load(vector + j) * (T(1) / length); });
            }
    }

    // `inside` begins with the products of the step.
    FASTWEIGHTS_OUTLINE void run_step(T* inside, const Step& now, T* memories, T* h) const {
        activate(inside + size, now);
        for (int n = 0; n < heads; ++n) correct(now, n, memories, missing_of(inside) + n * wide);
        // `read` holds M^T q by now.
        T total = 0, squares = 0;
        for (int n = 0; n < heads; ++n) {
            T* const sums = read + n * wide;
            const T* const z = inside + n * wide;
            C::fill(wide, sums, [&](int j) FASTWEIGHTS_INLINE_LAMBDA { return C::load(sums + j) + C::load(z + j); });
            total += C::sum_of(part, [&](int j) FASTWEIGHTS_INLINE_LAMBDA { return C::load(sums + j); })[0];
        }
        const T mean = total / T(p.size);
        for (int n = 0; n < heads; ++n)
            squares += C::sum_of(part, [&](int j) FASTWEIGHTS_INLINE_LAMBDA {
                const V difference = C::load(read + n * wide + j) - mean;
                return difference * difference;
            })[0];
        const T factor = T(1) / std::sqrt(squares / T(p.size) + T(p.eps));
        C::fill(size, h, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            const V normalised = (C::load(read + i) - mean) * factor;
            C::store(normalised, inside + i);
            const V y = normalised * C::load(gain + i) + C::load(bias + i);
            return y <= V{} ? V{} : y;  // in this order NaN stays NaN
        });
        missing_of(inside)[size] = factor;
    }

    // A head's part of a step: M changes, and is read into `read`.
    FASTWEIGHTS_OUTLINE void correct(const Step& now, int n, T* memories, T* missing) const {
        T* const m = memories + std::int64_t(n) * part * wide;
        const T *const q = now.q + n * wide, *const k = now.k + n * wide, *const v = now.v + n * wide;
        const T kept = now.gates[n], rate = now.gates[heads + n];
        T* const found = read + n * wide;
        C::template for_panels<8>(wide, [&](int j, auto block) FASTWEIGHTS_INLINE_LAMBDA {
            V held[block] = {};
            for (int i = 0; i < part; ++i)
                for (int c = 0; c < block; ++c) held[c] += C::load(m + i * wide + j + c * width) * k[i];
            for (int c = 0; c < block; ++c)
                C::store(C::load(v + j + c * width) - held[c] * kept, missing + j + c * width);
        });
        C::for_panels(wide, [&](int j, auto block) FASTWEIGHTS_INLINE_LAMBDA {
            V sum[block] = {}, written[block];
            for (int c = 0; c < block; ++c) written[c] = C::load(missing + j + c * width) * rate;
            for (int i = 0; i < part; ++i)
                for (int c = 0; c < block; ++c) {
                    T* const at = m + i * wide + j + c * width;
                    const V after = C::load(at) * kept + written[c] * k[i];
                    C::store(after, at);
                    sum[c] += after * q[i];
                }
            for (int c = 0; c < block; ++c) C::store(sum[c], found + j + c * width);
        });
    }
};

}  // namespace fastweights
