// C++17 and the public headers: tensors made in a call, kept by name, and in a tsr_param.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "tessera/tessera.h"

// What would point to a shape that is gone does not compile.
static_assert(std::is_convertible_v<tsr_shaped_tensor<2>&, tsr_tensor>);
static_assert(!std::is_convertible_v<tsr_shaped_tensor<2>, tsr_tensor>);
static_assert(!std::is_copy_constructible_v<tsr_shaped_tensor<2>>);

namespace {

void expect(bool so, int line) {
    if (so) return;
    std::fprintf(stderr, "line %d: %s\n", line, tsr_error_message(tsr_error_last()));
    std::exit(1);
}

}  // namespace

#define EXPECT(condition) expect(condition, __LINE__)

int main() {
    float weight[6] = {1, 2, 3, 4, 5, 6};
    float bias[2] = {7, 8};
    int64_t count[1] = {9};
    uint8_t mask[2] = {1, 0};
    tsr_state* state = nullptr;
    EXPECT(tsr_state_create(&state) == TSR_OK);
    EXPECT(tsr_state_add_tensor(state, "a", tsr_f32_2d(weight, 2, 3)) == TSR_OK);
    const auto kept = tsr_f32_1d(bias, 2);
    const tsr_param params[] = {{"b", kept}};
    EXPECT(tsr_state_add_tensor(state, params[0].name, &params[0].tensor) == TSR_OK);
    EXPECT(tsr_state_add_tensor(state, "c", tsr_i64_1d(count, 1)) == TSR_OK);
    EXPECT(tsr_state_add_tensor(state, "d", TSR_CPU_TENSOR(weight, TSR_DTYPE_F32, 3, 1, 2, 3)) == TSR_OK);
    EXPECT(tsr_state_add_tensor(state, "e", tsr_u8_1d(mask, 2)) == TSR_OK);
    const int64_t shapes[][3] = {{2, 3}, {2}, {1}, {1, 2, 3}, {2}};
    const int32_t ndims[] = {2, 1, 1, 3, 1};
    const tsr_dtype dtypes[] = {TSR_DTYPE_F32, TSR_DTYPE_F32, TSR_DTYPE_I64, TSR_DTYPE_F32, TSR_DTYPE_U8};
    for (size_t i = 0; i < 5; ++i) {
        tsr_param found{};
        EXPECT(tsr_state_tensor(state, i, &found) == TSR_OK);
        EXPECT(found.name[0] == static_cast<char>('a' + i) && found.tensor.ndim == ndims[i]);
        EXPECT(std::memcmp(found.tensor.shape, shapes[i], sizeof(int64_t) * static_cast<size_t>(ndims[i])) == 0);
        EXPECT(found.tensor.dtype == dtypes[i]);
    }
    tsr_state_destroy(state);
    return 0;
}
