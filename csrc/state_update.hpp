// One step of a selective scan, as a model takes it for each token that it writes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "columns.hpp"

namespace fastweights {

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
            C::fill(block, delta, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return R::softplus(C::load(delta + i)); });
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
            C::fill(block, rows, [&](int j) FASTWEIGHTS_INLINE_LAMBDA {
                return C::load(rows + j) * R::sigmoid(C::load(rows + j));
            });
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
};

}  // namespace fastweights
