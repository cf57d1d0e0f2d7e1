// A 3 x 3 convolution of images with few channels, and the leaky ReLU of the maximum of every 2 x 2 of its pixels, in one
// pass: src/fastweights/ops/conv_block/__init__.py has its definition.
//
// What the convolution gives is many times as large as the images, and four times as large as what is left of it. No more
// than two rows of it are there at a time, and in the gradient of the weights the maxima alone have a part.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "pooling.hpp"
#include "registers.hpp"

namespace fastweights {

struct ConvolutionProblem {
    std::int64_t images, height, width, inputs, channels;
    double slope;
    std::int64_t threads;
};

// One image. Its own channels are the inputs; those of the result lie side by side in blocks that fill a register, zeros
// past the last. Weights and their gradients are [blocks, 1 + 9 inputs, lanes]: the bias, then the taps, row by row, in
// each the inputs.
template <class T, int Bytes>
struct Convolution {
    using Wide = decltype(widened(T()));
    using R = Registers<Wide, Bytes>;
    using V = typename R::V;
    using Pixels = Pooling<T>;
    static constexpr int lanes = R::width;
    static constexpr int together = Bytes == 64 ? 4 : 2;  // pixels of the result whose four sums each stay in registers

    const std::int64_t height, width, inputs, channels, rows, columns, stride, filled;
    const Wide slope;

    FASTWEIGHTS_INLINE explicit Convolution(const ConvolutionProblem& p)
        : height(p.height),
          width(p.width),
          inputs(p.inputs),
          channels(p.channels),
          rows((p.height + 1) / 2),
          columns((p.width + 1) / 2),
          stride((2 * columns + 2) * p.inputs),
          filled((p.channels + lanes - 1) / lanes * lanes),
          slope(p.slope) {}

    // Room for the image between zeros, and for the four pixels of every maximum of a row; zeros at first.
    FASTWEIGHTS_INLINE std::int64_t room() const { return framed() + 4 * columns * filled; }

    FASTWEIGHTS_INLINE void forward(const T* images, const Wide* weights, T* pooled, std::uint8_t* codes, Wide* room,
                                    std::int64_t image) const {
        frame(images, room, image);
        Wide* const fours = room + framed();
        for (std::int64_t i = 0; i < rows; ++i) {
            with_inputs([&](auto inputs) FASTWEIGHTS_INLINE_LAMBDA {
                for (std::int64_t channel = 0; channel < filled; channel += lanes) {
                    std::int64_t j = 0;
                    const auto some = [&](auto count) FASTWEIGHTS_INLINE_LAMBDA {
                        for (; j + count <= columns; j += count)
                            convolve<count>(corner(room, i, j), inputs, weights + channel * (1 + 9 * inputs),
                                            four(fours, j) + channel);
                    };
                    some(std::integral_constant<int, together>{});
                    some(std::integral_constant<int, 1>{});
                }
            });
            for (std::int64_t j = 0; j < columns; ++j) {
                const bool right = 2 * j + 1 < width, below = 2 * i + 1 < height;
                const Wide* const of = four(fours, j);
                const Wide* const beneath = of + (below ? 2 * filled : 0);
                const std::int64_t to = ((image * rows + i) * columns + j) * channels, step = right ? filled : 0;
                Pixels::maxima(of, of + step, beneath, beneath + step, (right ? 1 : 0) | (below ? 2 : 0), pooled + to,
                               codes + to, channels, slope);
            }
        }
    }

    // The gradients of the weights, of this image alone; zeros at first.
    FASTWEIGHTS_INLINE void backward(const T* gradients, const std::uint8_t* codes, const T* images, Wide* weights,
                                     Wide* room, std::int64_t image) const {
        frame(images, room, image);
        Wide* const fours = room + framed();
        for (std::int64_t i = 0; i < rows; ++i) {
            for (std::int64_t j = 0; j < columns; ++j) {
                const std::int64_t from = ((image * rows + i) * columns + j) * channels;
                for (int p = 0; p < 4; ++p)
                    Pixels::one_of_four(p, gradients + from, codes + from, four(fours, j) + p * filled, channels, slope);
            }
            with_inputs([&](auto inputs) FASTWEIGHTS_INLINE_LAMBDA {
                for (std::int64_t channel = 0; channel < filled; channel += lanes)
                    for (std::int64_t input = 0; input < inputs; ++input)
                        gather(corner(room, i, 0), inputs, input, fours + channel, weights + channel * (1 + 9 * inputs));
            });
        }
    }

  private:
    // body(inputs), a constant to the compiler where images are grey or coloured: half the time.
    template <class Body>
    FASTWEIGHTS_INLINE void with_inputs(Body body) const {
        if (inputs == 1)
            body(std::integral_constant<std::int64_t, 1>{});
        else if (inputs == 3)
            body(std::integral_constant<std::int64_t, 3>{});
        else
            body(inputs);
    }

    FASTWEIGHTS_INLINE std::int64_t framed() const { return (2 * rows + 2) * stride; }

    // The first of the 4 x 4 pixels that four of the convolution see.
    FASTWEIGHTS_INLINE const Wide* corner(const Wide* room, std::int64_t i, std::int64_t j) const {
        return room + 2 * i * stride + 2 * j * inputs;
    }

    template <class Number>
    FASTWEIGHTS_INLINE Number* four(Number* fours, std::int64_t j) const {
        return fours + 4 * j * filled;
    }

    FASTWEIGHTS_INLINE void frame(const T* images, Wide* room, std::int64_t image) const {
        for (std::int64_t i = 0; i < height; ++i) {
            const T* const from = images + (image * height + i) * width * inputs;
            Wide* const to = room + (i + 1) * stride + inputs;
            for (std::int64_t k = 0; k < width * inputs; ++k) to[k] = widened(from[k]);
        }
    }

    // The fours of `count` maxima side by side, one block of their channels.
    template <int count, class Inputs>
    FASTWEIGHTS_INLINE void convolve(const Wide* corner, Inputs inputs, const Wide* weights, Wide* fours) const {
        V sums[2][2 * count];
        const V bias = loaded(weights);
#pragma GCC unroll 2
        for (int y = 0; y < 2; ++y)
#pragma GCC unroll 8
            for (int x = 0; x < 2 * count; ++x) sums[y][x] = bias;
        for (int down = 0; down < 3; ++down)
            for (std::int64_t k = 0; k < 3 * inputs; ++k) {
                const V weight = loaded(weights += lanes);
#pragma GCC unroll 2
                for (int y = 0; y < 2; ++y)
#pragma GCC unroll 8
                    for (int x = 0; x < 2 * count; ++x)
                        sums[y][x] += weight * corner[(y + down) * stride + x * inputs + k];
            }
#pragma GCC unroll 2
        for (int y = 0; y < 2; ++y)
#pragma GCC unroll 8
            for (int x = 0; x < 2 * count; ++x)
                std::memcpy(four(fours, x / 2) + (2 * y + x % 2) * filled, &sums[y][x], sizeof(V));
    }

    // Adds what a row of maxima gives the taps of one input, for one block of channels.
    template <class Inputs>
    FASTWEIGHTS_INLINE void gather(const Wide* corner, Inputs inputs, std::int64_t input, const Wide* fours,
                                   Wide* weights) const {
        V sums[9] = {}, bias = {};
        for (std::int64_t j = 0; j < columns; ++j, corner += 2 * inputs, fours = four(fours, 1)) {
            V parts[4];
#pragma GCC unroll 4
            for (int p = 0; p < 4; ++p) parts[p] = loaded(fours + p * filled);
#pragma GCC unroll 4
            for (int y = 0; y < 4; ++y)
#pragma GCC unroll 4
                for (int x = 0; x < 4; ++x) {
                    const Wide pixel = corner[y * stride + x * inputs + input];
#pragma GCC unroll 4
                    for (int p = 0; p < 4; ++p) {
                        const int down = y - p / 2, across = x - p % 2;
                        if (down >= 0 && down <= 2 && across >= 0 && across <= 2)
                            sums[3 * down + across] += parts[p] * pixel;
                    }
                }
            bias += (parts[0] + parts[1]) + (parts[2] + parts[3]);
        }
        if (input == 0) add(bias, weights);
        for (int k = 0; k < 9; ++k) add(sums[k], weights + (1 + k * inputs + input) * lanes);
    }

    static FASTWEIGHTS_INLINE V loaded(const Wide* from) {
        V value;
        std::memcpy(&value, from, sizeof value);
        return value;
    }

    static FASTWEIGHTS_INLINE void add(const V& value, Wide* to) {
        const V sum = loaded(to) + value;
        std::memcpy(to, &sum, sizeof sum);
    }
};

}  // namespace fastweights
