// The selective scan, with src/fastweights/ops/selective_scan/reference.py as its definition.
//
//     x <- exp(delta A) x + delta u B,   y = C x       for each channel, whose state x has N numbers
//
// Channels lie along the lanes of a register. A thread takes a slice of the channels of a sequence. The backward pass makes
// the states of a chunk of steps again from the one before it, which is all that the forward pass keeps.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "arena.hpp"
#include "columns.hpp"

namespace fastweights {

struct ScanProblem {
    std::int64_t batch, steps, channels, states;  // of packed sequences, `batch` of them are in one row of `steps`
};

template <class T>
struct ScanInputs {
    const T *u, *delta;          // [B,T,D]
    const T* a;                  // [N,D]
    const T *b, *c;              // [B,T,N]
    const T* state;              // [B,N,D], or null
    const std::int64_t* bounds;  // where packed sequences begin, and the end of the last; or null
};

template <class T>
struct ScanResults {
    T *outputs, *final;
    T* trace;  // the state before each chunk of each sequence, [chunks,N,D], or null
};

template <class T>
struct ScanGradients {
    T *u, *delta;  // [B,T,D]
    T* a;          // [B,N,D], to be summed over the sequences
    T *b, *c;      // [slices,B,T,N], to be summed over the slices
    T* state;      // [B,N,D], or null
};

struct UpdateProblem {
    std::int64_t batch, channels, states, groups;  // groups: of consecutive channels, which share b and c
    bool one_rate;                                 // a is [D]: all numbers of a state decay alike
    bool softplus;                                 // the step is softplus of delta, after the bias
};

template <class T>
struct UpdateTensors {
    T* state;               // [B,D,N], in place
    T* outputs;             // [B,D]
    const T *x, *delta;     // [B,D]
    const T* a;             // [D,N] or [D]
    const T *b, *c;         // [B,groups,N]
    const T *bias, *skip;   // [D], or null: added to delta; how much of x passes by
    const T* gate;          // [B,D], or null
};

constexpr int scan_chunk = 64;
// A number of its own, so that the sums over channels are the same on any number of threads.
constexpr int scan_slices = 8;

// One step, for channels from `first` to `last` of all sequences: the numbers of a state lie along the lanes.
template <class T, int Bytes>
struct StateUpdate {
    using C = Columns<T, Bytes>;
    using R = typename C::R;
    using V = typename C::V;
    static constexpr int width = C::width;
    static constexpr int block = 64;  // channels whose inputs and outputs are computed side by side
    static constexpr int team = 4;    // channels that wait for their exponentials together

    static FASTWEIGHTS_INLINE void run(const UpdateProblem& p, const UpdateTensors<T>& t, std::int64_t first,
                                       std::int64_t last) {
        const std::int64_t shared = p.channels / p.groups;
        for (std::int64_t row = first; row < last;) {
            const std::int64_t group = row / shared, rest = shared - row % shared;
            const int count = static_cast<int>(std::min({std::int64_t(block), last - row, rest}));
            run_block(p, t, row, row % p.channels, count, group * p.states);
            row += count;
        }
    }

  private:
    // Of one group of one sequence; `keys`: where its b and c begin.
    static FASTWEIGHTS_INLINE void run_block(const UpdateProblem& p, const UpdateTensors<T>& t, std::int64_t row,
                                             std::int64_t channel, int count, std::int64_t keys) {
        T delta[block], written[block], outputs[block], rows[block] = {};  // `rows`: one of the other inputs
        const auto load = [&](const T* from) FASTWEIGHTS_INLINE_LAMBDA { std::memcpy(rows, from, count * sizeof(T)); };
        load(t.delta + row);
        std::memcpy(delta, rows, sizeof delta);
        if (t.bias) {
            load(t.bias + channel);
            C::fill(block, delta, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(delta + i) + C::load(rows + i); });
        }
        if (p.softplus)
            C::fill(block, delta, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return softplus(C::load(delta + i)); });
        load(t.x + row);
        C::fill(block, written, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(delta + i) * C::load(rows + i); });

        T *const state = t.state + row * p.states;
        const T *const b = t.b + keys, *const c = t.c + keys;
        if (p.one_rate) {
            load(t.a + channel);
            C::fill(block, delta, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
                return R::exp_anywhere(C::load(delta + i) * C::load(rows + i));
            });
            read_all(count, p.states, state, b, c, written, outputs,
                     [&](int i, std::int64_t, auto) FASTWEIGHTS_INLINE_LAMBDA { return V{} + delta[i]; });
        } else {
            const T* const a = t.a + channel * p.states;
            read_all(count, p.states, state, b, c, written, outputs,
                     [&](int i, std::int64_t n, auto part) FASTWEIGHTS_INLINE_LAMBDA {
                         return R::exp_anywhere(load_part(a + i * p.states + n, part) * delta[i]);
                     });
        }

        if (t.skip) {
            load(t.skip + channel);
            for (int j = 0; j < count; ++j) outputs[j] += t.x[row + j] * rows[j];
        }
        if (t.gate) {
            load(t.gate + row);
            C::fill(block, rows, [&](int j) FASTWEIGHTS_INLINE_LAMBDA { return silu(C::load(rows + j)); });
            for (int j = 0; j < count; ++j) outputs[j] *= rows[j];
        }
        std::memcpy(t.outputs + row, outputs, count * sizeof(T));
    }

    // Changes the states of `count` channels, and reads them; factor(i, n, part): the decays of channel i from number n on.
    template <class Factor>
    static FASTWEIGHTS_INLINE void read_all(int count, std::int64_t states, T* state, const T* b, const T* c,
                                            const T* written, T* outputs, Factor factor) {
        for (int first = 0; first < count; first += width) {
            V sums[width] = {};
            int i = first;
            const int end = std::min(count, first + width);
            for (; i + team <= end; i += team) read<team>(i, states, state, b, c, written, sums + (i - first), factor);
            for (; i < end; ++i) read<1>(i, states, state, b, c, written, sums + (i - first), factor);
            C::store(R::sums_of(sums), outputs + first);
        }
    }

    template <int Count, class Factor>
    static FASTWEIGHTS_INLINE void read(int channel, std::int64_t states, T* state, const T* b, const T* c,
                                        const T* written, V* sums, Factor factor) {
        V sum[Count] = {};
        const auto step = [&](std::int64_t n, auto part) FASTWEIGHTS_INLINE_LAMBDA {
            const V key = load_part(b + n, part), query = load_part(c + n, part);
            V decay[Count];
#pragma GCC unroll 4
            for (int i = 0; i < Count; ++i) decay[i] = factor(channel + i, n, part);
#pragma GCC unroll 4
            for (int i = 0; i < Count; ++i) {
                T* const place = state + (channel + i) * states + n;
                const V now = decay[i] * load_part(place, part) + key * written[channel + i];
                std::memcpy(place, &now, part * sizeof(T));
                sum[i] += now * query;
            }
        };
        std::int64_t n = 0;
        for (; n + width <= states; n += width) step(n, std::integral_constant<int, width>{});
        if (n < states) step(n, static_cast<int>(states - n));
#pragma GCC unroll 4
        for (int i = 0; i < Count; ++i) sums[i] = sum[i];
    }

    template <class Part>
    static FASTWEIGHTS_INLINE V load_part(const T* from, Part part) {
        V x = {};
        std::memcpy(&x, from, part * sizeof(T));
        return x;
    }

    // log(1 + e^x).
    static FASTWEIGHTS_INLINE V softplus(V x) {
        const V y = R::exp(x < V{} ? x : -x);
        // log(1 + y) = 2 artanh(s), for s up to a third.
        const V s = y / (y + T(2)), square = s * s;
        constexpr int terms = sizeof(T) == 4 ? 7 : 16;
        V sum = V{} + T(1) / (2 * terms + 1);
        for (int k = terms - 1; k >= 0; --k) sum = sum * square + T(1) / (2 * k + 1);
        return x > V{} + T(20) ? x : (x < V{} ? V{} : x) + T(2) * s * sum;  // as torch has it
    }
    // x / (1 + e^-x).
    static FASTWEIGHTS_INLINE V silu(V x) {
        const V y = R::exp(x < V{} ? x : -x);
        return x * (x < V{} ? y : V{} + T(1)) / (y + T(1));
    }
};

template <class T, int Bytes>
struct SelectiveScan {
    using C = Columns<T, Bytes>;
    using R = typename C::R;
    using V = typename C::V;
    static constexpr int width = C::width;

    const ScanProblem& p;
    const ScanInputs<T>& in;
    std::int64_t sequence, slice, row, length, first_chunk, start, end;

    FASTWEIGHTS_INLINE SelectiveScan(const ScanProblem& problem, const ScanInputs<T>& inputs, std::int64_t item)
        : p(problem), in(inputs), sequence(item / scan_slices), slice(item % scan_slices) {
        const std::int64_t chunks = (p.steps + scan_chunk - 1) / scan_chunk;
        row = in.bounds ? in.bounds[sequence] : sequence * p.steps;
        length = in.bounds ? in.bounds[sequence + 1] - row : p.steps;
        first_chunk = in.bounds ? row / scan_chunk + sequence : sequence * chunks;
        // Whole cache lines, where there are enough of them: two threads would write into one.
        constexpr std::int64_t unit = 64 / sizeof(T);
        const std::int64_t units = (p.channels + unit - 1) / unit;
        start = std::min(p.channels, units * slice / scan_slices * unit);
        end = std::min(p.channels, units * (slice + 1) / scan_slices * unit);
    }

    FASTWEIGHTS_INLINE void forward(const ScanResults<T>& out) const {
        Arena arena(2 * p.states * width * sizeof(T));
        T *const a = arena.take<T>(p.states * width), *const x = arena.take<T>(p.states * width);
        for_blocks([&](std::int64_t d, auto count) FASTWEIGHTS_INLINE_LAMBDA {
            load_matrix(in.a, d, count, a);
            load_matrix(in.state ? in.state + sequence * p.states * p.channels : nullptr, d, count, x);
            for (std::int64_t t = 0; t < length; ++t) {
                if (out.trace && t % scan_chunk == 0) store_matrix(x, d, count, trace_at(out.trace, t / scan_chunk));
                const std::int64_t place = (row + t) * p.channels + d;
                const V delta = load(in.delta + place, count), written = delta * load(in.u + place, count);
                const T *const b = in.b + (row + t) * p.states, *const c = in.c + (row + t) * p.states;
                V y = {};
                for (std::int64_t n = 0; n < p.states; ++n) {
                    const V now = R::exp_anywhere(delta * C::load(a + n * width)) * C::load(x + n * width) + written * b[n];
                    C::store(now, x + n * width);
                    y += now * c[n];
                }
                store(y, count, out.outputs + place);
            }
            store_matrix(x, d, count, out.final + sequence * p.states * p.channels);
        });
    }

    FASTWEIGHTS_INLINE void backward(const T* trace, const T* grad_outputs, const T* grad_final,
                                     const ScanGradients<T>& to) const {
        const std::int64_t wide = p.states * width, whole = p.states * p.channels;
        const std::int64_t blocks = (end - start + width - 1) / width;
        Arena arena(((2 + 2 * blocks + 4 * scan_chunk) * wide) * sizeof(T));
        T *const a = arena.take<T>(wide), *const before = arena.take<T>(wide);
        T *const carried = arena.take_zeroed<T>(blocks * wide), *const grad_a = arena.take_zeroed<T>(blocks * wide);
        T *const states = arena.take<T>(scan_chunk * wide), *const decays = arena.take<T>(scan_chunk * wide);
        T *const grad_b = arena.take<T>(scan_chunk * wide), *const grad_c = arena.take<T>(scan_chunk * wide);
        if (grad_final)
            for_blocks([&](std::int64_t d, auto count) FASTWEIGHTS_INLINE_LAMBDA {
                load_matrix(grad_final + sequence * whole, d, count, carried + (d - start) / width * wide);
            });
        for (std::int64_t chunk = (length + scan_chunk - 1) / scan_chunk - 1; chunk >= 0; --chunk) {
            const std::int64_t first = row + chunk * scan_chunk;
            const std::int64_t steps = std::min<std::int64_t>(scan_chunk, row + length - first);
            std::fill_n(grad_b, steps * wide, T(0));
            std::fill_n(grad_c, steps * wide, T(0));
            for_blocks([&](std::int64_t d, auto count) FASTWEIGHTS_INLINE_LAMBDA {
                load_matrix(in.a, d, count, a);
                load_matrix(trace_at(trace, chunk), d, count, before);
                run_again(first, steps, d, count, a, before, states, decays);
                const std::int64_t block = (d - start) / width;
                run_back(first, steps, d, count, a, before, states, decays, grad_outputs, carried + block * wide,
                         grad_a + block * wide, grad_b, grad_c, to);
            });
            const std::int64_t rows = (in.bounds ? 1 : p.batch) * p.steps;
            for (std::int64_t t = 0; t < steps; ++t)
                for (std::int64_t n = 0; n < p.states; ++n) {
                    const std::int64_t place = (slice * rows + first + t) * p.states + n;
                    to.b[place] = R::sum(C::load(grad_b + t * wide + n * width))[0];
                    to.c[place] = R::sum(C::load(grad_c + t * wide + n * width))[0];
                }
        }
        for_blocks([&](std::int64_t d, auto count) FASTWEIGHTS_INLINE_LAMBDA {
            const std::int64_t block = (d - start) / width;
            store_matrix(grad_a + block * wide, d, count, to.a + sequence * whole);
            if (to.state) store_matrix(carried + block * wide, d, count, to.state + sequence * whole);
        });
    }

  private:
    template <class Count>
    FASTWEIGHTS_INLINE void run_again(std::int64_t first, std::int64_t steps, std::int64_t d, Count count, const T* a,
                                      const T* before, T* states, T* decays) const {
        const std::int64_t wide = p.states * width;
        for (std::int64_t t = 0; t < steps; ++t) {
            const std::int64_t place = (first + t) * p.channels + d;
            const V delta = load(in.delta + place, count), written = delta * load(in.u + place, count);
            const T* const b = in.b + (first + t) * p.states;
            const T* const last = t ? states + (t - 1) * wide : before;
            for (std::int64_t n = 0; n < p.states; ++n) {
                const V factor = R::exp_anywhere(delta * C::load(a + n * width));
                C::store(factor, decays + t * wide + n * width);
                C::store(factor * C::load(last + n * width) + written * b[n], states + t * wide + n * width);
            }
        }
    }

    template <class Count>
    FASTWEIGHTS_INLINE void run_back(std::int64_t first, std::int64_t steps, std::int64_t d, Count count, const T* a,
                                     const T* before, const T* states, const T* decays, const T* grad_outputs, T* carried,
                                     T* grad_a, T* grad_b, T* grad_c, const ScanGradients<T>& to) const {
        const std::int64_t wide = p.states * width;
        for (std::int64_t t = steps - 1; t >= 0; --t) {
            const std::int64_t place = (first + t) * p.channels + d;
            const V delta = load(in.delta + place, count), u = load(in.u + place, count);
            const V grad_y = load(grad_outputs + place, count), written = delta * u;
            const T *const b = in.b + (first + t) * p.states, *const c = in.c + (first + t) * p.states;
            const T* const last = t ? states + (t - 1) * wide : before;
            V by_input = {}, by_decay = {};
            for (std::int64_t n = 0; n < p.states; ++n) {
                const std::int64_t at = t * wide + n * width;
                const V grad = C::load(carried + n * width) + grad_y * c[n];  // of the state
                C::store(C::load(grad_c + at) + grad_y * C::load(states + at), grad_c + at);
                C::store(C::load(grad_b + at) + grad * written, grad_b + at);
                by_input += grad * b[n];
                const V earlier = grad * C::load(decays + at), of_log = earlier * C::load(last + n * width);
                C::store(earlier, carried + n * width);
                by_decay += of_log * C::load(a + n * width);
                C::store(C::load(grad_a + n * width) + of_log * delta, grad_a + n * width);
            }
            store(by_input * delta, count, to.u + place);
            store(by_decay + by_input * u, count, to.delta + place);
        }
    }

    // body(d, count) for blocks of channels of the slice: whole registers, then what is left, of a number known at run time.
    template <class Body>
    FASTWEIGHTS_INLINE void for_blocks(Body body) const {
        std::int64_t d = start;
        for (; d + width <= end; d += width) body(d, std::integral_constant<int, width>{});
        if (d < end) body(d, static_cast<int>(end - d));
    }
    static FASTWEIGHTS_INLINE V load(const T* from, int count) {
        V x = {};
        std::memcpy(&x, from, count * sizeof(T));
        return x;
    }
    static FASTWEIGHTS_INLINE void store(V x, int count, T* to) { std::memcpy(to, &x, count * sizeof(T)); }

    // Channels from d on of a matrix [N,D], zero for null; scratch has a register for each of N.
    FASTWEIGHTS_INLINE void load_matrix(const T* from, std::int64_t d, int count, T* to) const {
        for (std::int64_t n = 0; n < p.states; ++n)
            C::store(from ? load(from + n * p.channels + d, count) : V{}, to + n * width);
    }
    FASTWEIGHTS_INLINE void store_matrix(const T* from, std::int64_t d, int count, T* to) const {
        for (std::int64_t n = 0; n < p.states; ++n) store(C::load(from + n * width), count, to + n * p.channels + d);
    }
    template <class Pointer>
    FASTWEIGHTS_INLINE Pointer trace_at(Pointer trace, std::int64_t chunk) const {
        return trace + (first_chunk + chunk) * p.states * p.channels;
    }
};

}  // namespace fastweights
