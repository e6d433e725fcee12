// tessera/state.h through the C ABI: values of every kind, tensors, optimizers, and which of them a state refuses.
#include <cmath>

#include "api.hpp"

namespace {

using api::value_of;

TEST(StateApi, ValuesKeepTheirKinds) {
    api::Owned<tsr_state> state;
    ASSERT_OK(tsr_state_create(state.out()));
    EXPECT_OK(tsr_state_set_int64(state, "i", INT64_MIN));
    EXPECT_OK(tsr_state_set_double(state, "d", NAN));
    EXPECT_OK(tsr_state_set_value(state, "v", R"({"a": [1, 2.50, {"~":"bytes","v":"AAE="}]})"));
    int64_t integer = 0;
    double number = 0;
    EXPECT_OK(tsr_state_get_int64(state, "i", &integer));
    EXPECT_EQ(integer, INT64_MIN);
    EXPECT_OK(tsr_state_get_double(state, "d", &number));
    EXPECT_TRUE(std::isnan(number));
    EXPECT_EQ(value_of(state, "d"), R"({"~":"double","v":"nan"})");
    EXPECT_EQ(value_of(state, "v"), R"({"a":[1,2.5,{"~":"bytes","v":"AAE="}]})");
    char small[4] = "abc";
    size_t size = 0;
    EXPECT_OK(tsr_state_get_value(state, "v", small, sizeof small, &size));
    EXPECT_STREQ(small, "abc") << "what does not fit is not written";

    EXPECT_FAILS(tsr_state_get_int64(state, "d", &integer), TSR_E_INVALID_ARGUMENT, "not a 64-bit integer");
    EXPECT_FAILS(tsr_state_get_double(state, "i", &number), TSR_E_INVALID_ARGUMENT, "not a floating-point number");
    EXPECT_FAILS(tsr_state_get_int64(state, "x", &integer), TSR_E_NOT_FOUND, "'x'");
    EXPECT_FAILS(tsr_state_set_value(state, "v", "{\"a\":"), TSR_E_INVALID_ARGUMENT, "value 'v' is not valid JSON");
    EXPECT_FAILS(tsr_state_set_value(state, "v", R"([{"~":"bytes","v":"?"}])"), TSR_E_INVALID_ARGUMENT, "at [0].v");
    EXPECT_FAILS(tsr_state_set_int64(state, nullptr, 1), TSR_E_INVALID_ARGUMENT, "name is NULL");
    EXPECT_FAILS(tsr_state_set_int64(state, "", 1), TSR_E_INVALID_ARGUMENT, "is empty");
    EXPECT_FAILS(tsr_state_set_int64(nullptr, "i", 1), TSR_E_INVALID_ARGUMENT, "state is NULL");
    EXPECT_EQ(value_of(state, "v"), R"({"a":[1,2.5,{"~":"bytes","v":"AAE="}]})") << "a refused value changes nothing";
}

TEST(StateApi, TensorsAreChecked) {
    api::Owned<tsr_state> state;
    ASSERT_OK(tsr_state_create(state.out()));
    api::Array<float> array({4, 2}, 1.0F);
    tsr_tensor tensor = array.tensor();
    EXPECT_OK(tsr_state_add_tensor(state, "module.w", &tensor));
    EXPECT_FAILS(tsr_state_add_tensor(state, "w", &tensor), TSR_E_INVALID_ARGUMENT, "already has the name 'w'");
    EXPECT_FAILS(tsr_state_add_tensor(state, "module.", &tensor), TSR_E_INVALID_ARGUMENT, "'module.'");
    const std::array<int64_t, 2> strides{1, 4};
    tensor.strides = strides.data();
    EXPECT_FAILS(tsr_state_add_tensor(state, "t", &tensor), TSR_E_INVALID_ARGUMENT, "not contiguous");
    tensor.strides = nullptr;
    tensor.device_type = TSR_DEVICE_CUDA;
    EXPECT_NE(tsr_state_add_tensor(state, "t", &tensor), TSR_OK) << "no driver, or the memory is the host's";
    EXPECT_NE(tsr_state_set_stream(state, -1, nullptr), TSR_OK);

    const std::array<int64_t, 1> shape{5};
    const std::array<int32_t, 1> mesh{2};
    const std::array<tsr_placement, 1> rows{{{TSR_PLACE_SHARD, 0}}};
    api::Owned<tsr_layout> layout;
    ASSERT_OK(tsr_layout_create(shape.data(), 1, mesh.data(), rows.data(), 1, layout.out()));
    api::Array<float> piece({3}, 1.0F);
    const tsr_tensor three = piece.tensor();
    EXPECT_FAILS(tsr_state_add_sharded(state, "s", layout, TSR_DTYPE_F32, &three, 1), TSR_E_INVALID_ARGUMENT,
                 "gives rank 1 the box [3:5]");
    EXPECT_FAILS(tsr_state_add_sharded(state, "s", layout, TSR_DTYPE_F64, &three, 0), TSR_E_INVALID_ARGUMENT, "of f64");
    EXPECT_FAILS(tsr_state_add_sharded(state, "s", layout, TSR_DTYPE_F32, nullptr, 0), TSR_E_INVALID_ARGUMENT, "NULL");
    EXPECT_OK(tsr_state_add_sharded(state, "s", layout, TSR_DTYPE_F32, &three, 0));
}

TEST(StateApi, AnOptimizerIsAddedWholeOrNotAtAll) {
    api::Array<float> weight({4}, 1.0F);
    api::Array<float> gradient({4}, 0.0F);
    const tsr_param param{"w", weight.tensor()};
    const tsr_tensor grad = gradient.tensor();
    api::Owned<tsr_optimizer> optimizer;
    ASSERT_OK(tsr_adamw_create(&param, &grad, 1, nullptr, optimizer.out()));
    api::Owned<tsr_state> state;
    ASSERT_OK(tsr_state_create(state.out()));
    const tsr_tensor tensor = weight.tensor();
    ASSERT_OK(tsr_state_add_tensor(state, "optim.state.w.exp_avg_sq", &tensor));
    EXPECT_FAILS(tsr_state_add_optimizer(state, "optim", optimizer), TSR_E_INVALID_ARGUMENT,
                 "already has the name 'optim.state.w.exp_avg_sq'");
    EXPECT_OK(tsr_state_add_tensor(state, "optim.state.w.exp_avg", &tensor)) << "the moment before it is not there";
    EXPECT_OK(tsr_state_set_double(state, "optim.param_groups.0.lr", 1)) << "nor are the settings";
}

}  // namespace
