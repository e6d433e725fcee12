// What a tsr_tensor argument may be. All functions convert it in one place (guard.cc), so one of them stands for all.
#include "api.hpp"

namespace {

class TensorArgument : public ::testing::Test {
   protected:
    void SetUp() override { ASSERT_OK(tsr_state_create(state_.out())); }
    tsr_status add(const tsr_tensor& tensor) { return tsr_state_add_tensor(state_, "t", &tensor); }

    api::Owned<tsr_state> state_;
    api::Array<float> array_{{2, 3}, 1.0F};
    tsr_tensor good_ = array_.tensor();
};

TEST_F(TensorArgument, GoodOneIsTaken) { EXPECT_OK(add(good_)); }

TEST_F(TensorArgument, UnknownDtypeIsRefused) {
    for (const tsr_dtype dtype : {0, 64, -1, 1 << 30}) {
        tsr_tensor bad = good_;
        bad.dtype = dtype;
        EXPECT_FAILS(add(bad), TSR_E_INVALID_ARGUMENT, "unknown dtype " + std::to_string(dtype));
    }
}

TEST_F(TensorArgument, UnknownDeviceIsRefused) {
    tsr_tensor bad = good_;
    bad.device_type = 99;
    EXPECT_FAILS(add(bad), TSR_E_INVALID_ARGUMENT, "device type 99");
    bad.device_type = 0;
    EXPECT_FAILS(add(bad), TSR_E_INVALID_ARGUMENT, "device type 0");
}

TEST_F(TensorArgument, BadDimensionsAreRefused) {
    tsr_tensor bad = good_;
    bad.ndim = 9;
    EXPECT_FAILS(add(bad), TSR_E_INVALID_ARGUMENT, "9 dimensions");
    bad.ndim = -1;
    EXPECT_FAILS(add(bad), TSR_E_INVALID_ARGUMENT, "-1 dimensions");
    bad = good_;
    bad.shape = nullptr;
    EXPECT_FAILS(add(bad), TSR_E_INVALID_ARGUMENT, "no shape");
    const std::array<int64_t, 2> negative{2, -3};
    bad.shape = negative.data();
    EXPECT_FAILS(add(bad), TSR_E_INVALID_ARGUMENT, "negative size");
    const std::array<int64_t, 2> huge{int64_t{1} << 40, int64_t{1} << 40};
    bad.shape = huge.data();
    EXPECT_FAILS(add(bad), TSR_E_INVALID_ARGUMENT, "larger than");
}

TEST_F(TensorArgument, ContiguousStridesAreTakenOthersRefused) {
    const std::array<int64_t, 2> contiguous{3, 1};
    good_.strides = contiguous.data();
    EXPECT_OK(add(good_));
    const std::array<int64_t, 2> transposed{1, 2};
    good_.strides = transposed.data();
    EXPECT_FAILS(add(good_), TSR_E_INVALID_ARGUMENT, "not contiguous: stride 2 of dimension 1, expected 1");
    const std::array<int64_t, 2> padded{4, 1};
    good_.strides = padded.data();
    EXPECT_FAILS(add(good_), TSR_E_INVALID_ARGUMENT, "stride 4 of dimension 0, expected 3");
}

TEST_F(TensorArgument, StridesOfOneElementDimensionsDoNotMatter) {
    const std::array<int64_t, 3> shape{1, 6, 1};
    const std::array<int64_t, 3> strides{999, 1, -5};
    good_.ndim = 3;
    good_.shape = shape.data();
    good_.strides = strides.data();
    EXPECT_OK(add(good_));
}

TEST_F(TensorArgument, ReservedWordsMustBeZero) {
    for (size_t i = 0; i < 3; ++i) {
        tsr_tensor bad = good_;
        bad.reserved[i] = 1;
        EXPECT_FAILS(add(bad), TSR_E_INVALID_ARGUMENT, "reserved");
    }
}

TEST_F(TensorArgument, OnlyAnEmptyOneMayLackData) {
    good_.data = nullptr;
    EXPECT_FAILS(add(good_), TSR_E_INVALID_ARGUMENT, "no data");
    const std::array<int64_t, 2> empty{0, 3};
    good_.shape = empty.data();
    EXPECT_OK(add(good_));
}

TEST_F(TensorArgument, NullIsRefused) {
    EXPECT_FAILS(tsr_state_add_tensor(state_, "t", nullptr), TSR_E_INVALID_ARGUMENT, "NULL");
    EXPECT_FAILS(tsr_state_add_tensor(state_, nullptr, &good_), TSR_E_INVALID_ARGUMENT, "name is NULL");
}

TEST_F(TensorArgument, ByteOffsetMovesTheView) {
    api::Owned<tsr_comm> comm = api::alone();
    api::Array<float> two({10, 20});
    api::Array<float> out({0});
    tsr_tensor second = two.tensor();
    const int64_t one = 1;
    second.shape = &one;
    second.byte_offset = sizeof(float);
    const tsr_tensor output = out.tensor();
    ASSERT_OK(tsr_comm_all_gather(comm, &second, &output, nullptr, nullptr));
    EXPECT_EQ(out.values[0], 20);
}

}  // namespace
