// The backward pass of one sequence in the matrix form, from the outputs alone.
//
// The fast matrix is kept at the beginning of every chunk of steps, never at every step: a chunk is run again from
// there. A(t) itself is read backwards in time as that matrix and the few vectors written since.
#pragma once

#include "associative_matrix.hpp"

namespace fastweights {

template <class T, int Bytes>
struct BackwardSequence : Sequence<T, Bytes> {
    using Base = Sequence<T, Bytes>;
    using C = typename Base::C;
    using Trace = typename Base::Trace;
    using Base::arena, Base::in, Base::initial, Base::inner, Base::matrix, Base::pitch, Base::problem, Base::shared,
        Base::size;

    const int longest;  // steps of a chunk
    T *starts, *carried, *stored, *grad_z, *grad, *grad_u, *grad_hidden, *read, *ones, *traces;
    T *initial_rows = nullptr, *carried_initial = nullptr;

    // Steps of a chunk: about the root of their number, so that the matrices kept are no more than that either.
    static int chunk_steps(std::int64_t steps) {
        int chunk = 16;
        while (std::int64_t(chunk) * chunk < steps) chunk += 8;
        return chunk;
    }
    static std::int64_t numbers(const Problem& p, bool memory) {
        const std::int64_t pitch = C::padded(p.size), chunk = chunk_steps(p.steps);
        const std::int64_t matrices = (p.steps + chunk - 1) / chunk + 1 + (memory ? 2 : 0);
        return pitch * (matrices * p.size + 2 * chunk + 4) + chunk * (Base::trace_numbers(p) + 1);
    }

    FASTWEIGHTS_INLINE BackwardSequence(const Problem& p, const Inputs<T>& i, const Shared<T>& s)
        : Base(p, i, s, numbers(p, i.memory != nullptr)), longest(chunk_steps(p.steps)) {
        const std::int64_t whole = std::int64_t(size) * pitch;
        starts = arena.template take<T>((p.steps + longest - 1) / longest * whole);
        carried = arena.template take<T>(whole);
        if (in.memory) {
            initial_rows = arena.template take<T>(whole);
            carried_initial = arena.template take<T>(whole);
        }
        stored = arena.template take_zeroed<T>(longest * pitch);
        grad_z = arena.template take_zeroed<T>(longest * pitch);
        for (T** const vector : {&grad, &grad_u, &grad_hidden, &read}) *vector = arena.template take_zeroed<T>(pitch);
        ones = arena.template take<T>(longest);
        std::fill(ones, ones + longest, T(1));
        traces = arena.template take<T>(longest * Base::trace_numbers(p));
    }

    FASTWEIGHTS_INLINE Trace trace_of(int k) const {
        return this->trace_at(traces + k * Base::trace_numbers(problem));
    }

    // `partial` gathers the gradients of the slow weights: W [H][pitch], then gain [pitch] and shift [pitch].
    FASTWEIGHTS_INLINE void backward(std::int64_t b, const T* outputs, const T* grad_outputs, const Gradients<T>& out,
                                     T* partial) {
        const std::int64_t length = this->length(b), whole = std::int64_t(size) * pitch;
        const int chunks = static_cast<int>((length + longest - 1) / longest);
        std::fill(carried, carried + whole, T(0));
        std::fill(grad_hidden, grad_hidden + pitch, T(0));
        if (in.memory) {
            this->load_columns(in.memory + b * size * size, initial);
            for (int i = 0; i < size; ++i)
                this->load_row(in.memory + (b * size + i) * size, initial_rows + std::int64_t(i) * pitch);
            std::fill(carried_initial, carried_initial + whole, T(0));
        }
        keep_starts(b, chunks, outputs);
        for (int chunk = chunks - 1; chunk >= 0; --chunk) {
            const std::int64_t first = std::int64_t(chunk) * longest;
            const int count = static_cast<int>(std::min<std::int64_t>(longest, length - first));
            load_stored(b, first, count, outputs);
            std::copy(starts + chunk * whole, starts + (chunk + 1) * whole, matrix);
            for (int k = 0; k < count; ++k)
                this->step(first + k, b, stored + k * pitch, in.memory ? shared.kept[first + k] : T(0), trace_of(k));
            for (int k = count - 1; k >= 0; --k) {
                backward_step(b, first, k, starts + chunk * whole, grad_outputs, partial);
                std::memcpy(this->at(out.drive, first + k, b), grad_z + k * pitch, size * sizeof(T));
            }
            C::accumulate(partial, T(1), ones, grad_z, stored, count, size, pitch);
        }
        for (std::int64_t t = length; t < problem.steps; ++t) std::memset(this->at(out.drive, t, b), 0, size * sizeof(T));
        std::memcpy(out.hidden + b * size, grad_hidden, size * sizeof(T));
        if (in.memory == nullptr) return;
        for (int i = 0; i < size; ++i)
            for (int j = 0; j < size; ++j)
                out.memory[(b * size + i) * size + j] = T(problem.decay) * carried_initial[std::int64_t(i) * pitch + j];
    }

    FASTWEIGHTS_INLINE void load_stored(std::int64_t b, std::int64_t first, int count, const T* outputs) {
        for (int k = 0; k < count; ++k) {
            const std::int64_t t = first + k;
            this->load_row(t == 0 ? in.hidden + b * size : this->at(outputs, t - 1, b), stored + k * pitch);
        }
    }

    // starts[c]: all that was written before chunk c, without the initial memory, which need not be symmetric.
    FASTWEIGHTS_INLINE void keep_starts(std::int64_t b, int chunks, const T* outputs) {
        const std::int64_t whole = std::int64_t(size) * pitch;
        std::fill(starts, starts + whole, T(0));
        if (chunks < 2) return;
        T* const weight = traces;  // free until the first chunk is run again
        for (int k = 0; k < longest; ++k) weight[k] = shared.power[longest - 1 - k];
        for (int chunk = 1; chunk < chunks; ++chunk) {
            load_stored(b, std::int64_t(chunk - 1) * longest, longest, outputs);
            T* const next = starts + chunk * whole;
            std::copy(next - whole, next, next);
            C::accumulate(next, shared.kept[longest - 1], weight, stored, stored, longest, size, pitch);
        }
    }

    // From dL/dh(t+1) to dL/dz, which goes to grad_z[k], and dL/dh(t), t = first + k.
    FASTWEIGHTS_INLINE void backward_step(std::int64_t b, std::int64_t first, int k, const T* start,
                                          const T* grad_outputs, T* partial) {
        const std::int64_t t = first + k;
        const Trace trace = trace_of(k);
        T* const gz = grad_z + k * pitch;
        const T* const h = stored + k * pitch;
        this->load_row(this->at(grad_outputs, t, b), grad);
        add(grad_hidden, grad);
        std::fill(gz, gz + pitch, T(0));
        for (int s = inner - 1; s >= 0; --s) {
            const T* const state = trace.states + s * pitch;
            undo_activation(state + pitch, true, s, trace, partial);
            add(grad_u, gz);
            // `carried` is G + G^T for G = dL/dA(t): A is written as h h^T, so that dL/dh(t) = rate (G + G^T) h.
            std::fill(read, read + pitch, T(0));
            const T keep = s == inner - 1 ? T(problem.decay) : T(1);
            C::write_both_read(carried, keep, grad_u, state, h, size, pitch, read);
            if (in.memory) {  // its rows: dL/dA itself
                C::fill(pitch, grad, [](int) FASTWEIGHTS_INLINE_LAMBDA { return typename C::V{}; });
                C::write_read(carried_initial, keep, state, grad_u, state, size, pitch, grad);
            }
            read_back(k, t, start);
        }
        undo_activation(trace.states, problem.normalize_initial, inner, trace, partial);
        add(grad_u, gz);
        C::fill(pitch, grad_hidden, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(read + i) * T(problem.rate); });
        C::multiply(shared.weight_transposed, gz, size, pitch, T(1), grad_hidden);
    }

    // grad <- A(t)^T grad_u.
    FASTWEIGHTS_INLINE void read_back(int k, std::int64_t t, const T* start) {
        std::fill(grad, grad + pitch, T(0));
        C::multiply(start, grad_u, size, pitch, shared.kept[k], grad);
        for (int n = 0; n <= k; ++n) {
            const T* const h = stored + n * pitch;
            const T weight = shared.power[k - n] * C::dot(h, grad_u, pitch);
            C::fill(pitch, grad, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(grad + i) + C::load(h + i) * weight; });
        }
        if (in.memory) C::multiply(initial_rows, grad_u, size, pitch, shared.kept[t], grad);
    }

    FASTWEIGHTS_INLINE void add(const T* x, T* y) {
        C::fill(pitch, y, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(y + i) + C::load(x + i); });
    }

    // grad_u <- gradient of x from `grad`, that of state = f(LN(x)).
    FASTWEIGHTS_INLINE void undo_activation(const T* state, bool normalize, int slot, Trace trace, T* partial) {
        C::fill(pitch, grad_u, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            const auto f = C::load(state + i), g = C::load(grad + i);
            using V = typename C::V;
            return problem.tanh ? g * (T(1) - f * f) : f <= V{} ? V{} : g;
        });
        if (!normalize || in.gain == nullptr) return;
        const T* const normal = trace.normal + slot * pitch;
        T* const gain = partial + std::int64_t(size) * pitch;
        T* const shift = gain + pitch;
        C::fill(pitch, gain, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            return C::load(gain + i) + C::load(grad_u + i) * C::load(normal + i);
        });
        add(grad_u, shift);
        C::fill(pitch, grad_u, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            return C::load(grad_u + i) * C::load(shared.gain + i);
        });
        const auto mean = this->sum_of([&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(grad_u + i); }) / T(size);
        const auto along = this->sum_of([&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            return C::load(grad_u + i) * C::load(normal + i);
        }) / T(size);
        const T inverse = trace.inverse[slot];
        // The padding's gradient stays zero: it is multiplied with other paddings, but also carried on.
        C::fill(pitch, grad_u, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            return (C::load(grad_u + i) - mean - along * C::load(normal + i)) * inverse;
        });
        std::fill(grad_u + size, grad_u + pitch, T(0));
    }
};

}  // namespace fastweights
