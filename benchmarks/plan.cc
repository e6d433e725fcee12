// What one rank of 1,024 computes, without a message, for a save and for a load of 100,000 tensors: no other rank is
// there; and what every rank of a pipeline of 512 computes first, the whole schedule. Prints one JSON line a case:
// {"case", "ms": [a number a round]}.
#include <fmt/format.h>
#include <time.h>

#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "checkpoint/formats/native/contents.hpp"
#include "checkpoint/io/stream.hpp"
#include "checkpoint/load/checkpoint.hpp"
#include "checkpoint/model/plan.hpp"
#include "parallel/pipeline/simulate.hpp"
#include "temporary_directory.hpp"

namespace {

using namespace tsr;

constexpr int world_size = 1024;
constexpr int layers = 10'000;
constexpr int loading_rank = world_size - 1;
constexpr int rounds = 9;
constexpr int pipeline_ranks = 512;
constexpr int microbatches = 4096;
constexpr int pipeline_rounds = 5;

// One layer: matrices whose rows all ranks share, or each half of them, and whole vectors.
struct Kind {
    const char* name;
    Dims shape;
    Layout layout;
};

std::vector<Kind> kinds(int world) {
    const auto rows = [&](const Dims& shape) {
        const Placement placement = Placement::shard(0);
        return Layout::placed(shape, std::span(&world, 1), std::span(&placement, 1));
    };
    const auto hybrid = [&](const Dims& shape) {
        const int mesh[] = {2, world / 2};
        const Placement placements[] = {Placement::replicate(), Placement::shard(0)};
        return Layout::placed(shape, mesh, placements);
    };
    const auto whole = [&](const Dims& shape) { return Layout::replicated(shape, world); };
    const Dims matrix{2048, 8};
    const Dims few{256, 8};  // fewer rows than ranks
    const Dims vector{16};
    return {{"attn.q.weight", matrix, rows(matrix)},   {"attn.k.weight", matrix, rows(matrix)},
            {"attn.v.weight", matrix, rows(matrix)},   {"attn.o.weight", matrix, rows(matrix)},
            {"mlp.up.weight", matrix, hybrid(matrix)}, {"mlp.down.weight", matrix, hybrid(matrix)},
            {"mlp.up.bias", few, rows(few)},           {"mlp.down.bias", few, rows(few)},
            {"norm1.weight", vector, whole(vector)},   {"norm2.weight", vector, whole(vector)}};
}

// Each layer's layouts are its own objects, as when every tensor comes through the C API.
State state_of(int rank, int world, std::vector<std::byte>& memory) {
    State state;
    memory.resize(size_t{64} << 20);
    size_t used = 0;
    for (int layer = 0; layer < layers; ++layer) {
        for (const Kind& kind : kinds(world)) {
            std::vector<Tensor> pieces;
            for (const Box& box : kind.layout.boxes_of(rank)) {
                const size_t bytes = static_cast<size_t>(box.numel()) * size_of(DType::f32);
                pieces.push_back({memory.data() + used, box.sizes, DType::f32, {}});
                used += bytes;
            }
            state.add_sharded(fmt::format("model.layers.{}.{}", layer, kind.name), kind.layout, DType::f32, pieces,
                              rank);
        }
    }
    if (used > memory.size()) throw Error(Code::internal, "the memory is too small");
    return state;
}

// Of this thread's processor time: the machine's other work is none of a plan's.
double ms_of(const std::function<void()>& body) {
    const auto now = [] {
        timespec time{};
        ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
    };
    const double begin = now();
    body();
    return now() - begin;
}

void report(const std::string& name, const std::vector<double>& ms) {
    std::printf("{\"case\":\"%s\",\"ms\":[", name.c_str());
    for (size_t i = 0; i < ms.size(); ++i) std::printf("%s%.4f", i > 0 ? "," : "", ms[i]);
    std::printf("]}\n");
    std::fflush(stdout);
}

// The header of a rank's file of a save, and the file, of its size, with nothing in it.
SavedFile file_of(const std::vector<Piece>& pieces, int rank, const std::string& directory,
                  const std::string& save_id) {
    const FileHeader header = make_header(pieces, save_id);
    const std::string name = rank_file_name(rank, 0);
    const std::string path = directory + "/" + name;
    const auto file = open_file(posix_file_system(), path, OpenMode::create);
    write_all(*file, path, std::as_bytes(std::span(header.text)), 0);
    if (file->truncate(header.file_bytes()) < 0) throw Error(Code::io, "truncate");
    return {name, header.file_bytes(), crc32c(header.text)};
}

void bench_save(int rank, const State& state) {
    std::vector<double> first;
    std::vector<double> again;
    PlanCache kept;
    (void)kept.of(state, rank, world_size, {});
    for (int round = 0; round < rounds; ++round) {
        PlanCache fresh;
        first.push_back(ms_of([&] { (void)fresh.of(state, rank, world_size, {}); }));
        again.push_back(ms_of([&] { (void)kept.of(state, rank, world_size, {}); }));
    }
    report(fmt::format("save, first, rank {}", rank), first);
    report(fmt::format("save, again, rank {}", rank), again);
}

// The files that this rank reads are there.
void bench_load(const char* name, const Checkpoint& checkpoint, int rank, int world) {
    std::vector<std::byte> memory;
    const State state = state_of(rank, world, memory);
    const NativeContents contents(posix_file_system(), checkpoint.path(), checkpoint.manifest());
    const auto plan = [&] { (void)contents.transfers_of(checkpoint.plan_load(state).wanted); };
    plan();  // reads the headers
    std::vector<double> ms;
    for (int round = 0; round < rounds; ++round) ms.push_back(ms_of(plan));
    report(fmt::format("{}, rank {}", name, rank), ms);
}

void bench_pipeline(const char* schedule, int stages_per_rank) {
    std::vector<double> ms;
    for (int round = 0; round < pipeline_rounds; ++round) {
        ms.push_back(ms_of([&] {
            const auto made = pipeline::make_schedule(schedule, pipeline_ranks, stages_per_rank, microbatches);
            pipeline::validate(made);
            (void)pipeline::simulate(made);
        }));
    }
    report(fmt::format("pipeline, {}", schedule), ms);
}

void bench() {
    const tsr::testing::TemporaryDirectory directory;
    const std::string path = directory.path().string();
    Manifest manifest;
    manifest.save_id = "00000000-0000-4000-8000-000000000000";
    manifest.world_size = world_size;
    std::vector<std::vector<SavedFile>> files;
    for (int rank = 0; rank < world_size; ++rank) files.push_back({{rank_file_name(rank, 0), 0, 0}});
    std::shared_ptr<const StatePlan> of_rank0;
    std::vector<std::byte> memory;
    std::set<int> needed{0, loading_rank};
    for (auto rank = needed.begin(); rank != needed.end(); ++rank) {
        const State state = state_of(*rank, world_size, memory);
        PlanCache plans;
        const auto planned = plans.of(state, *rank, world_size, {});
        files[static_cast<size_t>(*rank)] = {file_of(planned->plan->files.at(0), *rank, path, manifest.save_id)};
        if (*rank == 0 || *rank == loading_rank) bench_save(*rank, state);
        if (*rank > 0) continue;
        of_rank0 = planned;
        // Ranks are files here.
        for (const auto& [name, tensor] : planned->plan->tensors()) {
            for (const Box& box : tensor->layout->boxes_of(loading_rank)) {
                tensor->for_each_piece(box, [&](const Box&, int file) { needed.insert(file); });
            }
        }
    }
    manifest.tensors = number_files(*of_rank0->plan, files, manifest.files);
    const std::string name = path + "/" + std::string(manifest_name);
    const std::string text = manifest.dump();
    const auto file = open_file(posix_file_system(), name, OpenMode::create);
    write_all(*file, name, std::as_bytes(std::span(text)), 0);
    std::vector<double> ms;
    for (int round = 0; round < rounds; ++round) ms.push_back(ms_of([&] { (void)Manifest::parse(text, name); }));
    report("manifest, parsed, rank 0", ms);

    const auto checkpoint = Checkpoint::open(path, posix_file_system(), Checkpoint::Hold::no);
    bench_load("load", *checkpoint, loading_rank, world_size);
}

}  // namespace

int main() {
    try {
        bench();
        bench_pipeline("1f1b", 1);
        bench_pipeline("zbv", 2);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "plan: %s\n", error.what());
        return 1;
    }
    return 0;
}
