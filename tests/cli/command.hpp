// What the tests of `tessera ckpt` share: the command as a user calls it, and checkpoints of known numbers that any
// number of ranks may have written.
#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "base/json.hpp"
#include "checkpoint/fixture.hpp"
#include "places.hpp"

namespace tsr::testing {

struct Result {
    int code = -1;
    std::string output;
};

// `tessera ckpt`, or another group. Both streams, or what `redirection` leaves.
inline Result tessera(const std::string& arguments, const std::string& redirection = "2>&1",
                      const std::string& group = "ckpt") {
    const std::string command = tsr::testing::binary_dir() + "/tessera " + group + " " + arguments + " " + redirection;
    Result result;
    FILE* pipe = ::popen(command.c_str(), "r");
    if (pipe == nullptr) throw std::runtime_error("popen");
    char buffer[4096];
    size_t n = 0;
    while ((n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0) result.output.append(buffer, n);
    const int status = ::pclose(pipe);
    result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return result;
}

// The JSON that a command prints, which ends with `code`.
inline Json json_of(const std::string& arguments, int code = 0) {
    const Result result = tessera(arguments, "2>/dev/null");
    EXPECT_EQ(result.code, code) << result.output;
    return Json::parse(result.output, arguments);
}

// Element `i` of each tensor is a function of i; ranks share "grid" by rows, "columns" by columns, and hold the rest
// whole. Returns what Checkpoint::open() calls the save.
struct Numbers {
    std::function<float(int64_t)> grid = [](int64_t i) { return static_cast<float>(i); };
    std::function<int64_t(int64_t)> columns = [](int64_t i) { return i * i; };
    Values values{{"epoch", Json(int64_t{3})}};
    std::string prefix;
};

inline std::string save_numbers(const std::string& root, int world_size, const Numbers& numbers = {}) {
    const Dims grid_shape{7, 5};
    const Dims columns_shape{4, 6};
    expect_all_well(run_meeting(world_size, [&](const std::shared_ptr<Communicator>& comm) {
        State state;
        std::list<std::vector<std::byte>> memory;
        const auto add = [&](const std::string& name, DType dtype, const Dims& shape, int dim, const auto& element) {
            const std::vector<int> mesh{world_size};
            const std::vector<Placement> placed{dim < 0 ? Placement::replicate() : Placement::shard(dim)};
            const Layout layout = Layout::placed(shape, mesh, placed);
            std::vector<Tensor> pieces;
            for (const Box& box : layout.boxes_of(comm->rank())) {
                auto& bytes = memory.emplace_back(static_cast<size_t>(box.numel()) * size_of(dtype));
                for (int64_t i = 0; i < box.numel(); ++i) {
                    const auto value = element(place_in(box, shape, i));
                    std::memcpy(bytes.data() + static_cast<size_t>(i) * sizeof value, &value, sizeof value);
                }
                pieces.push_back({bytes.data(), box.sizes, dtype, {}});
            }
            state.add_sharded(numbers.prefix + name, layout, dtype, pieces, comm->rank());
        };
        add("grid", DType::f32, grid_shape, 0, numbers.grid);
        add("columns", DType::i64, columns_shape, 1, numbers.columns);
        add("half", DType::bf16, {3}, -1, [](int64_t i) { return static_cast<uint16_t>(i == 0 ? 0x3f80 : 0xc040); });
        add("flags", DType::boolean, {2}, -1, [](int64_t i) { return static_cast<uint8_t>(i); });
        add("scalar", DType::f64, {}, -1, [](int64_t) { return 2.5; });
        add("empty", DType::f32, {0, 3}, -1, [](int64_t) { return 0.0F; });
        for (const auto& [name, value] : numbers.values) state.set_value(name, value);
        Saver saver(comm, root, saver_options());
        saver.save(10, state);
    }));
    return Checkpoint::open(root)->path();
}

// A safetensors file that holds "w", 1.0 and `second`, and what this version does not read: "odd", and `extra` too.
inline void save_unreadable(const std::string& path, float second, const std::string& extra = "") {
    std::string header = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)";
    header += R"("odd":{"dtype":"F6_E3M2","shape":[4],"data_offsets":[8,11]})";
    if (!extra.empty()) header += ",\"" + extra + R"(":{"dtype":"F4","shape":[2],"data_offsets":[11,12]})";
    header += '}';
    const auto size = static_cast<uint64_t>(header.size());
    const float numbers[] = {1, second};
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&size), sizeof size) << header;
    file.write(reinterpret_cast<const char*>(numbers), sizeof numbers) << (extra.empty() ? "odd" : "odd!");
}

}  // namespace tsr::testing
