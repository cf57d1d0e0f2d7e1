// The delta family at one level.
#include "dplr.hpp"

namespace fastweights {

#define FASTWEIGHTS_VARIANT(T, NAME, TARGET, BYTES)                                                                    \
    TARGET void forward_##NAME(const DeltaProblem& p, const DeltaInputs<T>& in, std::int64_t item,                     \
                               const DeltaResults<T>& out) {                                                           \
        if (is_one_step(p, in, out))                                                                                   \
            return in.a ? DplrStep<T, BYTES>::run(p, in, item, out) : DeltaStep<T, BYTES>::run(p, in, item, out);      \
        DeltaHead<T, BYTES> head(p, in);                                                                               \
        head.forward(item, out);                                                                                       \
    }                                                                                                                  \
    TARGET void backward_##NAME(const DeltaProblem& p, const DeltaInputs<T>& in, std::int64_t item, const T* trace,    \
                                const T* grad_outputs, const T* grad_final, const DeltaGradients<T>& out) {            \
        DeltaBackwardHead<T, BYTES> head(p, in);                                                                       \
        head.backward(item, trace, grad_outputs, grad_final, out);                                                     \
    }
FASTWEIGHTS_LEVEL(FASTWEIGHTS_VARIANT, float)
FASTWEIGHTS_LEVEL(FASTWEIGHTS_VARIANT, double)

}  // namespace fastweights
