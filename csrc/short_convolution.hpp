// A causal convolution of each channel by itself over the last few steps, with src/fastweights/ops/short_convolution/
// reference.py as its definition.
//
//     y_t = f(bias + sum over k of weight[W-1-k] x_{t-k})        k up to W - 1, and no further back than the last start
//
// Channels lie along the lanes of a register, steps one behind the other: nothing is turned round. A thread takes a block of
// the steps of a sequence, stripe by stripe of its channels, so that what several steps read stays near the processor. The
// backward pass makes again what f was given.
#pragma once

#include <algorithm>
#include <cstdint>

#include "arena.hpp"
#include "columns.hpp"

namespace fastweights {

struct ShortProblem {
    std::int64_t batch, steps, channels, taps;
    std::int64_t sequence_pitch, step_pitch;  // of x, in numbers
    bool silu;                                // f is silu; or nothing
};

template <class T>
struct ShortInputs {
    const T* x;          // [B,T,C], its steps as far apart as the problem says
    const T* weight;     // [W,C]
    const T* bias;       // [C], or null
    const T* last;       // the inputs before x, [B,W-1,C], or null
    const bool* starts;  // the steps before which another sequence begins, [B,T], or null
};

template <class T>
struct ShortGradients {
    T* x;        // [B,T,C]
    T* weight;   // [B,blocks,W+1,C], to be summed over the first two; the bias's comes last
    T* last;     // [B,W-1,C], or null
};

constexpr std::int64_t short_block = 64;  // steps; a number of its own, so that sums are the same on any number of threads
constexpr int short_stripe = 128;         // channels

template <class T, int Bytes>
struct ShortConvolution {
    using C = Columns<T, Bytes>;
    using R = typename C::R;
    using V = typename C::V;
    static constexpr int width = C::width;

    const ShortProblem& p;
    const ShortInputs<T>& in;
    const std::int64_t blocks, item, sequence, start, end;
    const int taps;

    FASTWEIGHTS_INLINE ShortConvolution(const ShortProblem& problem, const ShortInputs<T>& inputs, std::int64_t number)
        : p(problem),
          in(inputs),
          blocks((p.steps + short_block - 1) / short_block),
          item(number),
          sequence(item / blocks),
          start(item % blocks * short_block),
          end(std::min(p.steps, start + short_block)),
          taps(static_cast<int>(p.taps)) {}

    FASTWEIGHTS_INLINE void forward(T* outputs) const {
        Arena arena((end - start) * sizeof(int) + padded_weights());
        int* const reach = arena.take<int>(end - start);
        find_reach(start, end, reach);
        T* const weights = arena.take<T>((taps + 1) * short_stripe);
        for_stripes([&](std::int64_t first, int channels) FASTWEIGHTS_INLINE_LAMBDA {
            load_weights(first, channels, weights);
            for (std::int64_t t = start; t < end; ++t) {
                T* const to = outputs + (sequence * p.steps + t) * p.channels + first;
                for_registers(channels, [&](int c, auto count) FASTWEIGHTS_INLINE_LAMBDA {
                    const V sum = convolve(t, first + c, weights + c, reach[t - start], count);
                    save(p.silu ? sum * R::sigmoid(sum) : sum, count, to + c);
                });
            }
        });
    }

    FASTWEIGHTS_INLINE void backward(const T* grad_outputs, const ShortGradients<T>& out) const {
        const std::int64_t after = std::min(p.steps, end + taps - 1);  // steps that read one of the block's
        Arena arena((after - start) * sizeof(int) + 2 * padded_weights() + (after - start) * short_stripe * sizeof(T));
        int* const reach = arena.take<int>(after - start);
        find_reach(start, after, reach);
        T* const weights = arena.take<T>((taps + 1) * short_stripe);
        T* const sums = arena.take<T>((taps + 1) * short_stripe);
        T* const inner = arena.take<T>((after - start) * short_stripe);  // the gradient of what f was given
        for_stripes([&](std::int64_t first, int channels) FASTWEIGHTS_INLINE_LAMBDA {
            load_weights(first, channels, weights);
            std::fill_n(sums, (taps + 1) * short_stripe, T(0));
            for (std::int64_t t = start; t < after; ++t) {
                const T* const from = grad_outputs + (sequence * p.steps + t) * p.channels + first;
                T* const to = inner + (t - start) * short_stripe;
                for_registers(channels, [&](int c, auto count) FASTWEIGHTS_INLINE_LAMBDA {
                    V grad = fetch(from + c, count);
                    if (p.silu) {
                        const V sum = convolve(t, first + c, weights + c, reach[t - start], count);
                        const V gate = R::sigmoid(sum);
                        grad *= gate * (T(1) + sum * (T(1) - gate));
                    }
                    C::store(grad, to + c);
                    if (t >= end) return;
                    for (int k = 0; k <= reach[t - start]; ++k) {
                        T* const sum = sums + k * short_stripe + c;
                        C::store(C::load(sum) + grad * fetch(row(t - k) + first + c, count), sum);
                    }
                    T* const sum = sums + taps * short_stripe + c;
                    C::store(C::load(sum) + grad, sum);
                });
            }
            const auto pull = [&](std::int64_t t, T* to) FASTWEIGHTS_INLINE_LAMBDA {
                for_registers(channels, [&](int c, auto count) FASTWEIGHTS_INLINE_LAMBDA {
                    V sum = {};
                    for (int k = std::max<int>(0, static_cast<int>(start - t)); k < taps && t + k < after; ++k)
                        if (k <= reach[t + k - start])
                            sum += C::load(inner + (t + k - start) * short_stripe + c) *
                                   C::load(weights + k * short_stripe + c);
                    save(sum, count, to + c);
                });
            };
            for (std::int64_t t = start; t < end; ++t) pull(t, out.x + (sequence * p.steps + t) * p.channels + first);
            if (start == 0 && out.last)
                for (int t = 1 - taps; t < 0; ++t)
                    pull(t, out.last + (sequence * (taps - 1) + t + taps - 1) * p.channels + first);
            for (int k = 0; k <= taps; ++k) {
                // In the order of the weights: the one of the step itself is the last of them.
                const int place = k < taps ? taps - 1 - k : taps;
                T* const to = out.weight + (item * (taps + 1) + place) * p.channels + first;
                std::copy_n(sums + k * short_stripe, channels, to);
            }
        });
    }

  private:
    std::size_t padded_weights() const { return (taps + 1) * short_stripe * sizeof(T); }

    template <class Body>
    FASTWEIGHTS_INLINE void for_stripes(Body body) const {
        for (std::int64_t first = 0; first < p.channels; first += short_stripe)
            body(first, static_cast<int>(std::min<std::int64_t>(short_stripe, p.channels - first)));
    }
    template <class Body>
    FASTWEIGHTS_INLINE void for_registers(int channels, Body body) const {
        int c = 0;
        for (; c + width <= channels; c += width) body(c, std::integral_constant<int, width>{});
        if (c < channels) body(c, channels - c);
    }

    // How many steps back each of some steps reads.
    FASTWEIGHTS_INLINE void find_reach(std::int64_t first, std::int64_t last, int* reach) const {
        std::int64_t back = in.last ? taps - 1 : 0;  // steps that the one before `first` could look back to, and itself
        for (std::int64_t t = std::max<std::int64_t>(0, first - taps); t < last; ++t) {
            if (in.starts && in.starts[sequence * p.steps + t]) back = 0;
            else if (t == 0) back = in.last ? taps - 1 : 0;
            if (t >= first) reach[t - first] = static_cast<int>(std::min<std::int64_t>(back, taps - 1));
            ++back;
        }
    }

    FASTWEIGHTS_INLINE const T* row(std::int64_t t) const {
        return t < 0 ? in.last + (sequence * (taps - 1) + t + taps - 1) * p.channels
                     : in.x + sequence * p.sequence_pitch + t * p.step_pitch;
    }

    // Of channels from `first` on: the weight of a step and of those before it, one after the other, and the bias.
    FASTWEIGHTS_INLINE void load_weights(std::int64_t first, int channels, T* weights) const {
        for (int k = 0; k <= taps; ++k) {
            const T* const from = k < taps ? in.weight + (taps - 1 - k) * p.channels : in.bias;
            if (from) std::copy_n(from + first, channels, weights + k * short_stripe);
            else std::fill_n(weights + k * short_stripe, channels, T(0));
            std::fill_n(weights + k * short_stripe + channels, short_stripe - channels, T(0));
        }
    }

    template <class Count>
    FASTWEIGHTS_INLINE V convolve(std::int64_t t, std::int64_t channel, const T* weights, int reach, Count count) const {
        V sum = C::load(weights + taps * short_stripe);
        for (int k = 0; k <= reach; ++k) sum += fetch(row(t - k) + channel, count) * C::load(weights + k * short_stripe);
        return sum;
    }

    template <class Count>
    static FASTWEIGHTS_INLINE V fetch(const T* from, Count count) {
        V x = {};
        std::memcpy(&x, from, count * sizeof(T));
        return x;
    }
    template <class Count>
    static FASTWEIGHTS_INLINE void save(V x, Count count, T* to) {
        std::memcpy(to, &x, count * sizeof(T));
    }
};

}  // namespace fastweights
