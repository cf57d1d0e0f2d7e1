// The backward pass of one chunk, from the outputs and what the forward pass left in the trace.
#pragma once

#include "associative_chunk.hpp"

namespace fastweights {

template <class T, int Bytes>
struct BackwardChunk : Chunk<T, Bytes> {
    using Base = Chunk<T, Bytes>;
    using L = typename Base::L;
    using Row = typename Base::Row;
    using Trace = typename Base::Trace;
    using Base::arena, Base::in, Base::inner, Base::length, Base::memory, Base::problem, Base::shared, Base::size,
        Base::steps, Base::stored, Base::strengths, Base::stride, Base::u, Base::weights;

    Row *grad_stored, *grad_z, *products, *grad, *grad_u, *grad_gain, *grad_shift;
    Row* grad_strengths = nullptr;
    Row *read_grads = nullptr, *read_states = nullptr;  // what every read of the initial memory was, for its gradient

    static std::int64_t rows(const Problem& p, const Inputs<T>& i, const Shared<T>& s, std::int64_t index) {
        const std::int64_t stride = Base::padded(p.size), steps = Base::longest(s, index), reads = steps * p.inner_steps;
        return (steps + 1) * (stride + 1) + steps * stride + 4 * stride + (i.strengths ? steps : 0) +
               (Base::remembers(i, s, index) ? reads * (2 * stride + 1) : 0);
    }

    FASTWEIGHTS_INLINE BackwardChunk(const Problem& p, const Inputs<T>& i, const Shared<T>& s, std::int64_t index)
        : Base(p, i, s, index, rows(p, i, s, index)) {
        products = arena.template take<Row>(steps + std::int64_t(1));
        grad = arena.template take<Row>(stride);
        grad_u = arena.template take<Row>(stride);
        grad_stored = arena.template take_zeroed<Row>((steps + std::int64_t(1)) * stride);
        grad_z = arena.template take_zeroed<Row>(steps * std::int64_t(stride));
        grad_gain = arena.template take_zeroed<Row>(stride);
        grad_shift = arena.template take_zeroed<Row>(stride);
        if (strengths) grad_strengths = arena.template take_zeroed<Row>(steps);
        if (memory == nullptr) return;
        read_grads = arena.template take<Row>(std::int64_t(steps) * inner * stride);
        read_states = arena.template take<Row>(std::int64_t(steps) * inner * stride);
    }

    // `partial` gathers the gradients of the slow weights: W [H,H], then gain [H] and shift [H].
    FASTWEIGHTS_INLINE void backward(const Results<T>& from, const T* grad_outputs, const Gradients<T>& out,
                                     T* partial) {
        for (int t = 0; t < steps; ++t) this->gather_step(from.outputs, t, stored + (t + 1) * stride);
        for (int t = steps - 1; t >= 0; --t) {
            backward_step(t, this->trace_of(t, from.trace, nullptr), grad_outputs);
            this->scatter_step(grad_z + t * stride, t, out.drive);
            backward_transition(t);
        }
        this->clear_after_end(out.drive);
        this->scatter_given(grad_stored, out.hidden, size);
        if (strengths) scatter_strengths(out.strengths);
        Row kept;
        for (int t = 0; t < steps; ++t)
            if (this->clears(t, kept)) this->select(kept, stored + t * stride, stored + t * stride);
        L::outer(grad_z, stored, steps, stride, size, partial);
        if (in.gain) {
            T* const gain = partial + std::int64_t(size) * size;
            for (int i = 0; i < size; ++i) {
                gain[i] += grad_gain[i].sum();
                gain[size + i] += grad_shift[i].sum();
            }
        }
        if (memory) write_memory_gradient(out.memory);
    }

    // From dL/dz to its part in dL/dh(t), through W: none where h(t) had been cleared.
    FASTWEIGHTS_INLINE void backward_transition(int t) {
        Row* const target = grad_stored + t * stride;
        Row kept;
        if (!this->clears(t, kept)) return L::multiply(shared.weight_transposed, size, size, grad_z + t * stride, target);
        std::fill(grad, grad + stride, Row{});
        L::multiply(shared.weight_transposed, size, size, grad_z + t * stride, grad);
        this->select(kept, grad, grad);
        add(grad, target);
    }

    FASTWEIGHTS_INLINE void scatter_strengths(T* target) const {
        for (int t = 0; t < steps; ++t) {
            T numbers[L::chunk];
            std::memcpy(numbers, grad_strengths + t, sizeof numbers);
            for (int lane = 0; lane < L::chunk; ++lane)
                if (t < length[lane]) target[this->place(t, lane)] = numbers[lane];
        }
        for (int lane = 0; lane < L::chunk && this->episode[lane]; ++lane)
            for (std::int64_t t = length[lane]; t < this->episode[lane]->span; ++t) target[this->place(t, lane)] = T(0);
    }

    FASTWEIGHTS_INLINE void backward_step(int t, Trace trace, const T* grad_outputs) {
        Row* const gz = grad_z + t * stride;
        this->gather_step(grad_outputs, t, grad);
        add(grad_stored + (t + 1) * stride, grad);
        this->mask(t, grad);  // h(t+1) of a sequence that has ended is a constant
        for (int s = inner - 1; s >= 0; --s) {
            const Row* const state = trace.states + s * stride;
            undo_activation(grad, s + 1 < inner ? state + stride : stored + (t + 1) * stride, true, s, trace);
            this->mask(t, grad_u);
            add(grad_u, gz);
            // A(t) v = sum c_n h(n) (h(n) . v): the gradients of h(n), as key and as value, and of v.
            std::fill(grad, grad + size, Row{});
            L::dot(stored, t + 1, stride, size, state, weights);
            L::dot(stored, t + 1, stride, size, grad_u, products);
            if (strengths)
                for (int n = 0; n <= t; ++n) grad_strengths[n] += weights[n] * products[n] * shared.power[t - n];
            this->weigh(weights, t, weights);
            this->weigh(products, t, products);
            L::add_outer(weights, grad_u, products, state, t + 1, stride, size, grad_stored);
            L::mix(stored, t + 1, stride, size, products, grad);
            if (memory) backward_read(t, s, state);
        }
        undo_activation(grad, trace.states, problem.normalize_initial, inner, trace);
        add(grad_u, gz);
        this->mask(t, gz);
    }

    FASTWEIGHTS_INLINE void backward_read(int t, int s, const Row* state) {
        const T kept = shared.kept[t];
        Row* const scaled = read_grads + (std::int64_t(t) * inner + s) * stride;
        for (int i = 0; i < size; ++i) scaled[i] = grad_u[i] * kept;
        std::copy(state, state + size, read_states + (std::int64_t(t) * inner + s) * stride);
        L::mix(memory, size, stride, size, scaled, grad);
    }

    FASTWEIGHTS_INLINE void write_memory_gradient(T* target) {
        const int reads = steps * inner;
        Row* const column = arena.template take<Row>(reads);
        for (int i = 0; i < size; ++i) {
            for (int n = 0; n < reads; ++n) column[n] = read_grads[std::int64_t(n) * stride + i];
            std::fill(u, u + size, Row{});
            L::mix(read_states, reads, stride, size, column, u);
            this->scatter_given(u, target, std::int64_t(size) * size, std::int64_t(i) * size);
        }
    }

    FASTWEIGHTS_INLINE void add(const Row* x, Row* y) {
        for (int i = 0; i < size; ++i) y[i] += x[i];
    }

    // grad_u <- gradient of x from that of state = f(LN(x)).
    FASTWEIGHTS_INLINE void undo_activation(const Row* gradient, const Row* state, bool normalize, int slot,
                                            Trace trace) {
        for (int i = 0; i < size; ++i) grad_u[i] = this->slope(state[i], gradient[i]);
        if (!normalize || in.gain == nullptr) return;
        const Row* const normal = trace.normal + slot * stride;
        for (int i = 0; i < size; ++i) {
            grad_gain[i] += grad_u[i] * normal[i];
            grad_shift[i] += grad_u[i];
            grad_u[i] = grad_u[i] * in.gain[i];
        }
        const T share = T(1) / T(size);
        const Row mean = L::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return grad_u[i]; }) * share;
        const Row along =
            L::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return grad_u[i] * normal[i]; }) * share;
        const Row inverse = trace.deviation[slot];
        for (int i = 0; i < size; ++i) grad_u[i] = inverse * (grad_u[i] - mean - along * normal[i]);
    }
};

}  // namespace fastweights
