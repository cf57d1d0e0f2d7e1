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
    using V = typename Base::V;
    using Base::arena, Base::in, Base::inner, Base::memory, Base::problem, Base::shared, Base::size, Base::steps,
        Base::stored, Base::strengths, Base::stride, Base::u, Base::visible, Base::weights;

    Row *grad_stored, *grad_z, *products, *grad, *grad_u, *grad_gain, *grad_shift;
    Row* grad_strengths = nullptr;
    Row *read_grads = nullptr, *read_states = nullptr;  // what every read of the initial memory was, for its gradient

    static std::int64_t rows(const Problem& p, const Inputs<T>& i) {
        const std::int64_t stride = Base::padded(p.size), reads = p.steps * p.inner_steps;
        return (p.steps + 1) * (stride + 1) + p.steps * stride + 4 * stride + (i.strengths ? p.steps : 0) +
               (i.memory ? reads * (2 * stride + 1) : 0);
    }

    FASTWEIGHTS_INLINE BackwardChunk(const Problem& p, const Inputs<T>& i, const Shared<T>& s, std::int64_t index)
        : Base(p, i, s, index, rows(p, i)) {
        products = arena.template take<Row>(p.steps + 1);
        grad = arena.template take<Row>(stride);
        grad_u = arena.template take<Row>(stride);
        grad_stored = arena.template take_zeroed<Row>((p.steps + 1) * stride);
        grad_z = arena.template take_zeroed<Row>(p.steps * stride);
        grad_gain = arena.template take_zeroed<Row>(stride);
        grad_shift = arena.template take_zeroed<Row>(stride);
        if (strengths) grad_strengths = arena.template take_zeroed<Row>(p.steps);
        if (in.memory == nullptr) return;
        read_grads = arena.template take<Row>(p.steps * inner * stride);
        read_states = arena.template take<Row>(p.steps * inner * stride);
    }

    // `partial` gathers the gradients of the slow weights: W [H,H], then gain [H] and shift [H].
    FASTWEIGHTS_INLINE void backward(const Results<T>& from, const T* grad_outputs, const Gradients<T>& out,
                                     T* partial) {
        for (int t = 0; t < steps; ++t) this->gather_step(from.outputs, t, stored + (t + 1) * stride);
        if (visible) see_the_end();
        for (int t = steps - 1; t >= 0; --t) {
            backward_step(t, this->trace_of(t, from.trace, nullptr), grad_outputs);
            this->scatter_step(grad_z + t * stride, t, out.drive);
            backward_transition(t);
            if (visible) end_before(t);
        }
        this->clear_after_end(out.drive);
        this->scatter_batch(grad_stored, out.hidden, size);
        if (strengths) scatter_strengths(out.strengths);
        Row kept;
        for (int t = 0; t < steps; ++t)  // what W did not see has no part in its gradient
            if (this->hides(t, kept)) this->select(kept, stored + t * stride, stored + t * stride);
        L::outer(grad_z, stored, steps, stride, size, partial);
        if (in.gain) {
            T* const gain = partial + std::int64_t(size) * size;
            for (int i = 0; i < size; ++i) {
                gain[i] += grad_gain[i].sum();
                gain[size + i] += grad_shift[i].sum();
            }
        }
        if (in.memory) write_memory_gradient(out.memory);
    }

    // Where sequences restart, what they see at their last step; and what is no number is left out, which in a product
    // would reach the gradient of another sequence.
    FASTWEIGHTS_OUTLINE void see_the_end() {
        const auto clean = [](V x) FASTWEIGHTS_INLINE_LAMBDA { return x - x == V{} ? x : V{}; };
        for (std::int64_t i = 0; i < (steps + std::int64_t(1)) * stride; ++i) stored[i] = stored[i].map(clean);
        for (std::int64_t i = 0; memory && i < size * std::int64_t(stride); ++i) memory[i] = memory[i].map(clean);
        for (int lane = 0; lane < L::chunk; ++lane) this->look(lane, oldest_before(steps, lane), steps);
    }
    // The first hidden state that a lane sees at step t - 1.
    FASTWEIGHTS_INLINE int oldest_before(int t, int lane) const {
        while (t > 0 && !this->is_marked(in.starts, t - 1, lane)) --t;
        return t;
    }
    // Before step t, lanes that restart there are at another sequence, to which no gradient goes.
    FASTWEIGHTS_OUTLINE void end_before(int t) {
        Row kept;
        if (!this->find(in.starts, t, kept)) return;
        const Row* const target = grad_stored + std::int64_t(t) * stride;
        const Row passed = L::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return target[i] * target[i]; });
        for (int n = 0; n <= t && this->is_any(kept, passed); ++n)  // zero, or no number
            this->select(kept, grad_stored + std::int64_t(n) * stride, grad_stored + std::int64_t(n) * stride);
        for (int lane = 0; lane < L::chunk; ++lane)
            if (this->is_marked(in.starts, t, lane)) this->look(lane, oldest_before(t, lane), t);
    }

    // From dL/dz to its part in dL/dh(t), through W.
    FASTWEIGHTS_OUTLINE void backward_transition(int t) {
        Row* const target = grad_stored + t * stride;
        Row kept;
        if (!this->hides(t, kept)) return L::multiply(shared.weight_transposed, size, size, grad_z + t * stride, target);
        std::fill(grad, grad + stride, Row{});
        L::multiply(shared.weight_transposed, size, size, grad_z + t * stride, grad);
        this->select(kept, grad, grad);
        add(grad, target);
    }

    FASTWEIGHTS_OUTLINE void scatter_strengths(T* target) const {
        for (std::int64_t t = 0; t < problem.steps; ++t) {
            T numbers[L::chunk] = {};
            if (t < steps) std::memcpy(numbers, grad_strengths + t, sizeof numbers);
            for (int lane = 0; lane < L::chunk && this->first + lane < problem.batch; ++lane)
                target[t * problem.batch + this->first + lane] = numbers[lane];
        }
    }

    FASTWEIGHTS_OUTLINE void backward_step(int t, Trace trace, const T* grad_outputs) {
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
            if (strengths) add_strengths(t);
            this->weigh(weights, t, weights);
            this->weigh(products, t, products);
            L::add_outer(weights, grad_u, products, state, t + 1, stride, size, grad_stored);
            L::mix(stored, t + 1, stride, size, products, grad);
            if (in.memory) backward_read(t, s, state);
        }
        undo_activation(grad, trace.states, problem.normalize_initial, inner, trace);
        add(grad_u, gz);
        this->mask(t, gz);
    }

    FASTWEIGHTS_OUTLINE void add_strengths(int t) {
        for (int n = 0; n <= t; ++n) {
            const Row share = weights[n] * products[n] * shared.power[t - n];
            grad_strengths[n] += visible ? Base::select(visible[n], share) : share;
        }
    }

    FASTWEIGHTS_OUTLINE void backward_read(int t, int s, const Row* state) {
        const T kept = shared.kept[t];
        Row* const scaled = read_grads + (std::int64_t(t) * inner + s) * stride;
        Row* const asked = read_states + (std::int64_t(t) * inner + s) * stride;
        for (int i = 0; i < size; ++i) scaled[i] = grad_u[i] * kept;
        std::copy(state, state + size, asked);
        if (visible) {
            this->select(visible[problem.steps], scaled, scaled);
            this->select(visible[problem.steps], asked, asked);
        }
        L::mix(memory, size, stride, size, scaled, grad);
    }

    FASTWEIGHTS_OUTLINE void write_memory_gradient(T* target) {
        const int reads = steps * inner;
        Row* const column = arena.template take<Row>(problem.steps * inner);
        for (int i = 0; i < size; ++i) {
            for (int n = 0; n < reads; ++n) column[n] = read_grads[std::int64_t(n) * stride + i];
            std::fill(u, u + size, Row{});
            L::mix(read_states, reads, stride, size, column, u);
            this->scatter_batch(u, target, std::int64_t(size) * size, std::int64_t(i) * size);
        }
    }

    FASTWEIGHTS_INLINE void add(const Row* x, Row* y) {
        for (int i = 0; i < size; ++i) y[i] += x[i];
    }

    // grad_u <- gradient of x from that of state = f(LN(x)).
    FASTWEIGHTS_OUTLINE void undo_activation(const Row* gradient, const Row* state, bool normalize, int slot,
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
