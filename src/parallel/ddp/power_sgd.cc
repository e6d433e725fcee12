#include "parallel/ddp/power_sgd.hpp"

#include <algorithm>
#include <cmath>
#include <random>

#include "tensor/convert.hpp"

namespace tsr {

namespace {

struct Shape {
    size_t rows;
    size_t columns;
};

Shape shape_of(const Tensor& grad) {
    const auto rows = static_cast<size_t>(grad.shape[0]);
    return {rows, rows == 0 ? 0 : static_cast<size_t>(grad.numel()) / rows};
}

// The same on every rank: the standard fixes the output of this generator. Q need not be orthogonal; P is made so.
void start(std::vector<float>& right, size_t param) {
    std::mt19937_64 random(param);
    for (float& value : right) value = static_cast<float>(random() >> 40) / 0x1p23F - 1;
}

// Replaces columns that have become zero, which cannot start the next step.
void restart_empty_columns(std::vector<float>& right, size_t rank, size_t param) {
    std::vector<float> fresh;
    for (size_t c = 0; c < rank; ++c) {
        bool empty = true;
        for (size_t j = c; j < right.size() && empty; j += rank) empty = right[j] == 0;
        if (!empty) continue;
        fresh.resize(right.size());
        start(fresh, param);
        for (size_t j = c; j < right.size(); j += rank) right[j] = fresh[j];
    }
}

// Gram-Schmidt over the columns of a rows x rank matrix, with two passes per column, because one leaves the rounding
// errors of nearly parallel columns. A column of which nothing remains becomes zero.
void orthogonalise(float* matrix, size_t rows, size_t rank) {
    for (size_t c = 0; c < rank; ++c) {
        float before = 0;
        for (size_t i = 0; i < rows; ++i) before += matrix[i * rank + c] * matrix[i * rank + c];
        for (int pass = 0; pass < 2; ++pass) {
            for (size_t other = 0; other < c; ++other) {
                float dot = 0;
                for (size_t i = 0; i < rows; ++i) dot += matrix[i * rank + c] * matrix[i * rank + other];
                for (size_t i = 0; i < rows; ++i) matrix[i * rank + c] -= dot * matrix[i * rank + other];
            }
        }
        float squares = 0;
        for (size_t i = 0; i < rows; ++i) squares += matrix[i * rank + c] * matrix[i * rank + c];
        // The rounding residue of a column in the span of the previous ones is not a direction.
        const float factor = squares <= before * 1e-10F ? 0 : 1 / std::sqrt(squares);
        for (size_t i = 0; i < rows; ++i) matrix[i * rank + c] *= factor;
    }
}

}  // namespace

bool PowerSgd::compresses(const Tensor& grad) const {
    if (grad.shape.ndim() < 2 || grad.dtype == DType::f64) return false;
    const auto [rows, columns] = shape_of(grad);
    return 2 * (rows + columns) * std::min({rank_, rows, columns}) <= rows * columns && rows * columns > 0;
}

PowerSgd::Matrix& PowerSgd::matrix_of(size_t param, const Tensor& grad) {
    Matrix& matrix = matrices_[param];
    if (!matrix.right.empty()) return matrix;
    const auto [rows, columns] = shape_of(grad);
    matrix = {rows, columns, std::min({rank_, rows, columns}), {}, std::vector<float>(rows * columns)};
    matrix.right.resize(columns * matrix.rank);
    start(matrix.right, param);
    return matrix;
}

void PowerSgd::reduce(std::span<const size_t> params, std::span<const Tensor> grads, const Average& average,
                      Scale scale) {
    std::vector<float> left;
    for (size_t k = 0; k < params.size(); ++k) {
        Matrix& m = matrix_of(params[k], grads[k]);
        std::vector<float> gradient(m.error.size());
        convert(grads[k].data, grads[k].dtype, reinterpret_cast<std::byte*>(gradient.data()), DType::f32,
                grads[k].numel());
        for (size_t i = 0; i < gradient.size(); ++i) m.error[i] += gradient[i];
        const size_t begin = left.size();
        left.resize(begin + m.rows * m.rank);
        for (size_t i = 0; i < m.rows; ++i) {
            for (size_t j = 0; j < m.columns; ++j) {
                for (size_t c = 0; c < m.rank; ++c) {
                    left[begin + i * m.rank + c] += m.error[i * m.columns + j] * m.right[j * m.rank + c];
                }
            }
        }
    }
    average(left);

    std::vector<float> right;
    size_t at = 0;
    for (size_t k = 0; k < params.size(); ++k) {
        const Matrix& m = matrices_.at(params[k]);
        orthogonalise(left.data() + at, m.rows, m.rank);
        const size_t begin = right.size();
        right.resize(begin + m.columns * m.rank);
        for (size_t i = 0; i < m.rows; ++i) {
            for (size_t j = 0; j < m.columns; ++j) {
                for (size_t c = 0; c < m.rank; ++c) {
                    right[begin + j * m.rank + c] += m.error[i * m.columns + j] * left[at + i * m.rank + c];
                }
            }
        }
        at += m.rows * m.rank;
    }
    average(right);

    const float* p = left.data();
    const float* q = right.data();
    for (size_t k = 0; k < params.size(); ++k) {
        Matrix& m = matrices_.at(params[k]);
        std::vector<float> gradient(m.error.size());
        bool finite = true;
        for (size_t i = 0; i < m.rows; ++i) {
            for (size_t j = 0; j < m.columns; ++j) {
                float sum = 0;
                for (size_t c = 0; c < m.rank; ++c) sum += p[i * m.rank + c] * q[j * m.rank + c];
                finite = finite && std::isfinite(sum);
                m.error[i * m.columns + j] -= sum * scale.own;
                gradient[i * m.columns + j] = sum * scale.result;
            }
        }
        convert(reinterpret_cast<const std::byte*>(gradient.data()), DType::f32, grads[k].data, grads[k].dtype,
                grads[k].numel());
        const size_t size = m.columns * m.rank;
        if (finite) {
            std::copy_n(q, size, m.right.begin());
            restart_empty_columns(m.right, m.rank, params[k]);
        } else {
            // This step is lost, which the trainer sees; a NaN in the error would spoil every later step.
            std::fill(m.error.begin(), m.error.end(), 0.0F);
            start(m.right, params[k]);
        }
        p += m.rows * m.rank;
        q += size;
    }
}

}  // namespace tsr
