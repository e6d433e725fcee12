// tessera/random.h through the C ABI: parts of the layouts that the library makes have the bits of the whole tensor.
#include "api.hpp"

namespace {

constexpr uint64_t seed = 7;
constexpr uint64_t stream = 3;

std::vector<double> whole(std::vector<int64_t> shape) {
    api::Array<double> all(std::move(shape), 0);
    const tsr_tensor tensor = all.tensor();
    EXPECT_OK(tsr_random_normal(&tensor, seed, stream, 0, 0.02, nullptr, 0));
    return all.values;
}

size_t elements(const tsr_tensor& tensor) {
    size_t count = 1;
    for (int32_t d = 0; d < tensor.ndim; ++d) count *= static_cast<size_t>(tensor.shape[d]);
    return count;
}

// The rows of a 2-d tensor that `slice` is, from `row` and `column`.
void expect_box(const tsr_tensor& slice, const std::vector<double>& all, size_t columns, size_t row, size_t column) {
    const auto* values = static_cast<const double*>(slice.data);
    const auto width = static_cast<size_t>(slice.shape[1]);
    for (size_t i = 0; i < elements(slice); ++i) {
        ASSERT_EQ(values[i], all[(row + i / width) * columns + column + i % width]) << i;
    }
}

TEST(RandomApi, SlicesOfATensorParallelModelAreThoseOfTheWhole) {
    const std::vector<double> fc1 = whole({7, 5});
    const std::vector<double> fc2 = whole({4, 7});
    api::run_ranks(3, [&](tsr_comm* comm, int32_t rank) {
        const char* name = "tp";
        const int32_t size = 3;
        api::Owned<tsr_mesh> mesh;
        ASSERT_OK(tsr_mesh_create(comm, &name, &size, 1, mesh.out()));
        const std::array<int64_t, 2> first{7, 5};
        const std::array<int64_t, 2> second{4, 7};
        std::array<tsr_param, 2> params{};
        params[0] = {"fc1.weight", {}};
        params[1] = {"fc2.weight", {}};
        for (tsr_param& param : params) {
            param.tensor.ndim = 2;
            param.tensor.dtype = TSR_DTYPE_F64;
            param.tensor.device_type = TSR_DEVICE_CPU;
        }
        params[0].tensor.shape = first.data();
        params[1].tensor.shape = second.data();
        const std::array<tsr_tp_rule, 2> rules{tsr_tp_rule{"fc1", TSR_TP_COLUMN, 0, nullptr},
                                               tsr_tp_rule{"fc2", TSR_TP_ROW, 0, nullptr}};
        api::Owned<tsr_tp> tp;
        ASSERT_OK(tsr_tp_create(mesh, params.data(), 2, rules.data(), 2, nullptr, tp.out()));
        for (size_t i = 0; i < 2; ++i) {
            api::Owned<tsr_layout> layout;
            tsr_param slice;
            ASSERT_OK(tsr_tp_layout(tp, i, layout.out()));
            ASSERT_OK(tsr_tp_slice(tp, i, &slice));
            ASSERT_OK(tsr_random_normal(&slice.tensor, seed, stream, 0, 0.02, layout, rank));
            const auto offset = 3 * static_cast<size_t>(rank);
            expect_box(slice.tensor, i == 0 ? fc1 : fc2, i == 0 ? 5 : 7, i == 0 ? offset : 0, i == 0 ? 0 : offset);
        }
    });
}

TEST(RandomApi, ShardsOfAnFsdpModelAreThoseOfTheWhole) {
    const std::vector<double> rows = whole({5, 3});
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        for (const tsr_flag flat : {0, 1}) {
            api::Array<double> weight({5, 3}, 0);
            const tsr_param param{"w", weight.tensor()};
            tsr_fsdp_unit unit{};
            ASSERT_OK(tsr_fsdp_unit_init(&unit, sizeof unit));
            unit.name = "u";
            unit.params = &param;
            unit.n = 1;
            unit.flat = flat;
            api::Owned<tsr_fsdp> fsdp;
            ASSERT_OK(tsr_fsdp_create(comm, &unit, 1, nullptr, fsdp.out()));
            api::Owned<tsr_layout> layout;
            tsr_param shard;
            ASSERT_OK(tsr_fsdp_layout(fsdp, 0, layout.out()));
            ASSERT_OK(tsr_fsdp_shard(fsdp, 0, &shard));
            ASSERT_OK(tsr_random_normal(&shard.tensor, seed, stream, 0, 0.02, layout, rank));
            const auto* values = static_cast<const double*>(shard.tensor.data);
            const size_t count = elements(shard.tensor);
            const size_t first = rank == 0 ? 0 : rows.size() - count;
            for (size_t i = 0; i < count; ++i) EXPECT_EQ(values[i], rows[first + i]) << i;
        }
    });
}

TEST(RandomApi, MasksAndRanges) {
    api::Array<uint8_t> mask({1000}, uint8_t{7});
    const tsr_tensor tensor = mask.tensor();
    ASSERT_OK(tsr_random_bernoulli(&tensor, seed, stream, 0.5, nullptr, -1));
    api::Array<double> numbers({1000}, 0);
    const tsr_tensor range = numbers.tensor();
    ASSERT_OK(tsr_random_uniform(&range, seed, stream, 0, 1, nullptr, 0));
    for (size_t i = 0; i < 1000; ++i) EXPECT_EQ(mask.values[i], numbers.values[i] < 0.5 ? 1 : 0);
}

TEST(RandomApi, BadInputIsRefused) {
    api::Array<float> part({2, 3}, 5);
    const tsr_tensor tensor = part.tensor();
    const std::array<int64_t, 2> shape{5, 3};
    const int32_t ranks = 2;
    const tsr_placement rows{TSR_PLACE_SHARD, 0};
    api::Owned<tsr_layout> layout;
    ASSERT_OK(tsr_layout_create(shape.data(), 2, &ranks, &rows, 1, layout.out()));
    EXPECT_OK(tsr_random_uniform(&tensor, seed, stream, 0, 1, layout, 1));
    part.values.assign(6, 5);
    EXPECT_FAILS(
        tsr_random_uniform(&tensor, seed, stream, 0, 1, layout, 0), TSR_E_INVALID_ARGUMENT,
        "output has shape [2, 3], but rank 0 holds 9 elements of the tensor of shape [5, 3]: output needs shape "
        "[3, 3] or [9]");
    EXPECT_FAILS(tsr_random_normal(&tensor, seed, stream, 0, 1, layout, 2), TSR_E_INVALID_ARGUMENT, "rank 2");
    EXPECT_FAILS(tsr_random_normal(&tensor, seed, stream, 0, -1, nullptr, 0), TSR_E_INVALID_ARGUMENT,
                 "deviation is -1");
    EXPECT_FAILS(tsr_random_uniform(&tensor, seed, stream, 1, 0, nullptr, 0), TSR_E_INVALID_ARGUMENT, "low is 1");
    EXPECT_FAILS(tsr_random_bernoulli(&tensor, seed, stream, 2, nullptr, 0), TSR_E_INVALID_ARGUMENT, "p is 2");
    EXPECT_FAILS(tsr_random_bernoulli(nullptr, seed, stream, 0.5, nullptr, 0), TSR_E_INVALID_ARGUMENT,
                 "output is NULL");
    const api::Owned<tsr_comm> comm = api::alone();
    const auto* no_layout = reinterpret_cast<const tsr_layout*>(static_cast<tsr_comm*>(comm));
    EXPECT_FAILS(tsr_random_uniform(&tensor, seed, stream, 0, 1, no_layout, 0), TSR_E_INVALID_ARGUMENT,
                 "is not a handle of the expected type");
    tsr_layout_destroy(layout);
    EXPECT_FAILS(tsr_random_uniform(&tensor, seed, stream, 0, 1, layout, 1), TSR_E_INVALID_STATE, "layout");
    EXPECT_EQ(part.values, std::vector<float>(6, 5));
}

}  // namespace
