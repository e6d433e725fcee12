// Ranks of one host that load one checkpoint together: what several of them want is read once and arrives everywhere,
// and what goes wrong at one of them is told by all.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <filesystem>
#include <future>
#include <random>

#include "checkpoint/export/export.hpp"
#include "checkpoint/formats/host_reads.hpp"
#include "checkpoint/save/agreement.hpp"
#include "fault/faulty_files.hpp"
#include "fixture.hpp"
#include "patience.hpp"

namespace tsr::testing {
namespace {

constexpr int64_t mib = int64_t{1} << 20;

Outcomes run_with_comm(int world_size, const RankBody& body, const CommOptions& options = test_options()) {
    const auto store = make_memory_store(patience(milliseconds{30000}));
    return run_threads(world_size, [&](int rank) { body(Communicator::create(store, rank, world_size, options)); });
}

// 12 MiB that every rank holds, and rows of 4 MiB that the ranks share out.
void build(OwnedState& owned, int rank, int world_size) {
    owned.add_whole({"a.weight", DType::f64, {1024, 1024}});
    owned.add_whole({"b.weight", DType::f64, {512, 1024}});
    const Dims rows{509, 1024};
    owned.add_sharded({"c.rows", DType::f64, rows},
                      Layout::placed(rows, std::vector<int>{world_size}, std::vector<Placement>{Placement::shard(0)}),
                      rank);
}

std::string saved(const TempDir& dir, uint64_t step = 1) {
    OwnedState owned;
    build(owned, 0, 1);
    owned.fill(step);
    SaverOptions options = saver_options();
    options.plan.split_bytes = INT64_MAX;
    Saver saver(nullptr, dir.path(), options);
    saver.save(static_cast<int64_t>(step), owned.state);
    return only_save(dir.path());
}

// Counts the bytes of data that are read, by all ranks.
class CountingFiles {
   public:
    CountingFiles()
        : files_(posix_file_system(), [this](const FaultyFiles::Call& call) -> Verdict {
              if (call.name.starts_with("read ") && call.name.ends_with(".safetensors")) {
                  bytes_ += static_cast<int64_t>(call.bytes);
              }
              return {};
          }) {}
    FileSystem& files() { return files_; }
    [[nodiscard]] int64_t bytes() const { return bytes_; }

   private:
    std::atomic<int64_t> bytes_{0};
    FaultyFiles files_;
};

LoadOptions together(const std::shared_ptr<Communicator>& comm) {
    LoadOptions options;
    options.comm = comm;
    return options;
}

class HostReadsOf : public ::testing::TestWithParam<int> {};

TEST_P(HostReadsOf, ReadEachByteOnce) {
    const int world_size = GetParam();
    const TempDir dir;
    const std::string path = saved(dir);
    for (const bool alone : {false, true}) {
        CountingFiles counting;
        expect_all_well(run_with_comm(world_size, [&](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            build(owned, comm->rank(), world_size);
            owned.poison();
            std::vector<std::pair<int64_t, int64_t>> told;
            LoadOptions options = alone ? LoadOptions() : together(comm);
            options.progress = [&](Phase phase, int64_t done, int64_t total) {
                EXPECT_EQ(phase, Phase::read);
                told.emplace_back(done, total);
            };
            (void)Checkpoint::open(path, counting.files())->load(owned.state, options);
            EXPECT_EQ(owned.differences(1), 0);
            EXPECT_GE(told.front().second, 12 * mib);
            EXPECT_EQ(told.back().first, told.front().second);
        }));
        const int64_t once = 16 * mib;
        if (alone) {
            EXPECT_GT(counting.bytes(), once + (world_size - 1) * 12 * mib - mib);
        } else {
            // And each rank the header, of which a byte may be asked for twice.
            EXPECT_LE(counting.bytes(), once + world_size * 16384);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Worlds, HostReadsOf, ::testing::Values(2, 3, 5));

// Four ranks on two hosts, whose ranks take turns.
Outcomes run_on_two_hosts(const RankBody& body) {
    const auto store = make_memory_store(patience(milliseconds{30000}));
    return run_threads(4, [&](int rank) {
        CommOptions options = test_options("auto");
        options.host_id = rank % 2 == 0 ? "a" : "b";
        body(Communicator::create(store, rank, 4, options));
    });
}

TEST(HostReads, EachHostReadsEachByteOnce) {
    const TempDir dir;
    const std::string path = saved(dir);
    CountingFiles counting;
    expect_all_well(run_on_two_hosts([&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        build(owned, comm->rank(), 4);
        owned.poison();
        (void)Checkpoint::open(path, counting.files())->load(owned.state, together(comm));
        EXPECT_EQ(owned.differences(1), 0);
    }));
    // What all hold, once a host; of the rows those blocks twice that ranks of both hosts have.
    EXPECT_GT(counting.bytes(), 2 * 12 * mib + 3 * mib);
    EXPECT_LE(counting.bytes(), 2 * 12 * mib + (4 + 4) * mib + 4 * 16384);
}

// Ranks 0 and 1 of one host each get the layouts of a random mesh, and all blocks are exchanged however few they are.
TEST(HostReads, EveryElementArrivesWhateverTheLayouts) {
    const TempDir dir;
    const std::vector<Spec> specs{{"a", DType::f32, {701, 503}},   {"b", DType::bf16, {64, 8, 5}},
                                  {"c", DType::u8, {4099}},        {"d", DType::f64, {1, 97, 3}},
                                  {"e", DType::f32, {1300, 1000}}, {"f", DType::i64, {}}};
    OwnedState whole;
    for (const Spec& spec : specs) whole.add_whole(spec);
    whole.fill(7);
    {
        Saver saver(nullptr, dir.path(), saver_options());
        saver.save(7, whole.state);
    }
    std::mt19937 seeds(4711);
    for (int round = 0; round < 12; ++round) {
        const uint32_t seed = seeds();
        SCOPED_TRACE("seed " + std::to_string(seed));
        for (const int world_size : {2, 4}) {
            expect_all_well(run_with_comm(world_size, [&](const std::shared_ptr<Communicator>& comm) {
                std::mt19937 random(seed);
                OwnedState owned;
                for (const Spec& spec : specs) {
                    if (spec.shape.ndim() < 2 || random() % 3 == 0) {
                        owned.add_whole(spec);
                        continue;
                    }
                    const std::vector<int> mesh =
                        random() % 2 == 0 ? std::vector<int>{world_size} : std::vector<int>{2, world_size / 2};
                    std::vector<Placement> placements;
                    for (size_t m = 0; m < mesh.size(); ++m) {
                        const auto dim = static_cast<int>(random() % static_cast<uint32_t>(spec.shape.ndim()));
                        placements.push_back(random() % 3 == 0 ? Placement::replicate() : Placement::shard(dim));
                    }
                    owned.add_sharded(spec, Layout::placed(spec.shape, mesh, placements), comm->rank());
                }
                owned.poison();
                SaverOptions options = saver_options();
                options.least_shared_bytes = 0;
                Saver saver(comm, dir.path(), options);
                EXPECT_EQ(saver.resume(owned.state), 7);
                EXPECT_EQ(owned.differences(7), 0);
                LoadOptions unverified = together(comm);
                unverified.least_shared_bytes = 0;
                unverified.verify = Verify::none;
                owned.poison();
                (void)Checkpoint::open(dir.path())->load(owned.state, unverified);
                EXPECT_EQ(owned.differences(7), 0);
            }));
        }
    }
}

// What every rank throws when rank 1 loads through `files`.
Outcomes load_with_faults(const std::string& path, const FaultyFiles::Judge& judge) {
    FaultyFiles files(posix_file_system(), judge);
    return run_with_comm(3, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        build(owned, comm->rank(), 3);
        const auto checkpoint = Checkpoint::open(path, comm->rank() == 1 ? files : posix_file_system());
        (void)checkpoint->load(owned.state, together(comm));
    });
}

void expect_on_all(const Outcomes& outcomes, Code code, const std::string& text) {
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), code) << outcome->what();
        EXPECT_NE(std::string(outcome->what()).find(text), std::string::npos) << outcome->what();
    }
}

TEST(HostReads, AnErrorOfOneRankIsThatOfAll) {
    const TempDir dir;
    const std::string path = saved(dir);
    int64_t reads = 0;
    std::mutex mutex;
    const auto count = [&](const FaultyFiles::Call& call) -> Verdict {
        const std::lock_guard lock(mutex);
        reads += call.name.starts_with("read ") && call.bytes >= 65536 ? 1 : 0;
        return {};
    };
    expect_all_well(load_with_faults(path, count));
    ASSERT_GE(reads, 2);
    for (int64_t at = 1; at <= reads; ++at) {
        SCOPED_TRACE(at);
        int64_t seen = 0;
        const auto outcomes = load_with_faults(path, [&](const FaultyFiles::Call& call) -> Verdict {
            const std::lock_guard lock(mutex);
            const bool hit = call.name.starts_with("read ") && call.bytes >= 65536 && ++seen == at;
            return hit ? Verdict{-EIO, 0} : Verdict{};
        });
        expect_on_all(outcomes, Code::io, "rank 1: cannot read " + path);
        // Told once, however often it was voted on.
        for (const auto& outcome : outcomes) {
            EXPECT_EQ(std::string(outcome->what()).rfind("rank 1: ", 0), 0u) << outcome->what();
            EXPECT_EQ(std::string(outcome->what()).find("rank ", 8), std::string::npos) << outcome->what();
        }
    }
}

TEST(HostReads, ARankThatFailsBeforeItReadsFailsAll) {
    const TempDir dir;
    const std::string path = saved(dir);
    const auto outcomes = run_with_comm(3, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        build(owned, comm->rank(), 3);
        if (comm->rank() == 2) owned.add_whole({"z", DType::f32, {3}});
        (void)Checkpoint::open(path)->load(owned.state, together(comm));
    });
    expect_on_all(outcomes, Code::mismatch, "rank 2: ");
}

TEST(HostReads, DamageIsCorruptOnEveryRankWithTheFile) {
    const TempDir dir;
    const std::string path = saved(dir);
    const std::string file = path + "/rank-00000.safetensors";
    std::string text = slurp(file);
    text[text.size() - 3 * mib] ^= 4;
    spill(file, text);
    expect_on_all(load_with_faults(path, [](const FaultyFiles::Call&) { return Verdict{}; }), Code::corrupt, file);
}

TEST(HostReads, RanksThatLoadDifferentSavesAreTold) {
    const TempDir one;
    const TempDir other;
    const std::string path = saved(one);
    const std::string second = saved(other);
    const auto outcomes = run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        build(owned, comm->rank(), 2);
        (void)Checkpoint::open(comm->rank() == 0 ? path : second)->load(owned.state, together(comm));
    });
    expect_on_all(outcomes, Code::mismatch, fmt::format("rank 1 loads {}, but rank 0 loads {};", second, path));
}

TEST(HostReads, RanksOfDifferentHostsThatLoadDifferentSavesAreTold) {
    const TempDir one;
    const TempDir other;
    const std::string path = saved(one);
    const std::string second = saved(other);
    const auto outcomes = run_on_two_hosts([&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        build(owned, comm->rank(), 4);
        (void)Checkpoint::open(comm->rank() % 2 == 0 ? path : second)->load(owned.state, together(comm));
    });
    expect_on_all(outcomes, Code::mismatch, fmt::format("rank 1 loads {}, but rank 0 loads {};", second, path));
}

TEST(HostReads, ARankThatVerifiesTakesNothingUncheckedFromOneThatDoesNot) {
    const TempDir dir;
    const std::string path = saved(dir);
    const auto outcomes = run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        build(owned, comm->rank(), 2);
        LoadOptions options = together(comm);
        if (comm->rank() == 1) options.verify = Verify::none;
        (void)Checkpoint::open(path)->load(owned.state, options);
    });
    expect_on_all(outcomes, Code::mismatch,
                  fmt::format("rank 1 loads {} unverified, but rank 0 loads {};", path, path));
}

// Loads for itself what the others load together, and goes on with a barrier.
TEST(HostReads, ARankThatLoadsAloneWhileOthersLoadTogetherIsToldAtItsNextCollective) {
    const TempDir dir;
    const std::string path = saved(dir);
    const auto outcomes = run_with_comm(3, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        build(owned, comm->rank(), 3);
        (void)Checkpoint::open(path)->load(owned.state, comm->rank() == 1 ? LoadOptions() : together(comm));
        Request barrier;
        barrier.collective = Collective::barrier;
        comm->run(barrier);
    });
    for (const auto& outcome : outcomes) {
        ASSERT_TRUE(outcome);
        EXPECT_EQ(outcome->code(), Code::mismatch) << outcome->what();
        EXPECT_NE(std::string(outcome->what()).find("checkpoint vote"), std::string::npos) << outcome->what();
    }
}

TEST(HostReads, OneThatNeverComesIsNamedAtTheDeadline) {
    const TempDir dir;
    const std::string path = saved(dir);
    std::promise<void> told;
    const auto outcomes = run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        build(owned, comm->rank(), 2);
        if (comm->rank() == 1) {
            EXPECT_EQ(told.get_future().wait_for(patience(std::chrono::seconds(30))), std::future_status::ready);
            return;
        }
        comm->set_timeout(milliseconds{300});
        const auto error = attempt([&] { (void)Checkpoint::open(path)->load(owned.state, together(comm)); });
        told.set_value();
        if (error) throw Error(*error);
    });
    ASSERT_TRUE(outcomes[0]);
    EXPECT_EQ(outcomes[0]->code(), Code::timeout) << outcomes[0]->what();
    EXPECT_EQ(outcomes[0]->record()->peer, 1);
    EXPECT_NE(std::string(outcomes[0]->what()).find("rank 1"), std::string::npos) << outcomes[0]->what();
}

// --- other formats ---

class HostReadsOfFormat : public ::testing::TestWithParam<ExportFormat> {
   protected:
    std::string exported(const std::string& from) {
        const std::string path = fmt::format("{}/{}", dir_.path(), name_of(GetParam()));
        ExportOptions options;
        options.format = GetParam();
        Peers alone(nullptr);
        (void)export_checkpoint(*Checkpoint::open(from), alone, path, options);
        return path;
    }
    // The largest of its files.
    static std::string data_file(const std::string& directory) {
        std::filesystem::path largest;
        for (const auto& file : std::filesystem::directory_iterator(directory)) {
            if (largest.empty() || file.file_size() > std::filesystem::file_size(largest)) largest = file.path();
        }
        return largest.string();
    }
    TempDir dir_;
};

TEST_P(HostReadsOfFormat, ReadEachByteOnce) {
    const std::string path = exported(saved(dir_));
    for (const Verify verify : {Verify::blocks, Verify::none}) {
        for (const bool alone : {false, true}) {
            std::atomic<int64_t> bytes{0};
            FaultyFiles files(posix_file_system(), [&](const FaultyFiles::Call& call) -> Verdict {
                if (call.name.starts_with("read ") && call.bytes >= 65536) bytes += static_cast<int64_t>(call.bytes);
                return {};
            });
            expect_all_well(run_with_comm(3, [&](const std::shared_ptr<Communicator>& comm) {
                OwnedState owned;
                build(owned, comm->rank(), 3);
                owned.poison();
                std::vector<std::pair<int64_t, int64_t>> told;
                LoadOptions options = alone ? LoadOptions() : together(comm);
                options.verify = verify;
                options.progress = [&](Phase, int64_t done, int64_t total) { told.emplace_back(done, total); };
                (void)Checkpoint::open(path, files)->load(owned.state, options);
                EXPECT_EQ(owned.differences(1), 0);
                EXPECT_GE(told.front().second, 12 * mib);
                EXPECT_EQ(told.back().first, told.front().second);
            }));
            if (alone) {
                EXPECT_GE(bytes, (3 * 12 + 3) * mib);
            } else {
                EXPECT_GE(bytes, 12 * mib + 3 * mib);
                EXPECT_LE(bytes, 16 * mib);
            }
        }
    }
}

TEST_P(HostReadsOfFormat, EveryElementArrivesWhateverTheLayouts) {
    const std::vector<Spec> specs{{"a", DType::f32, {701, 503}},
                                  {"b", DType::bf16, {64, 8, 5}},
                                  {"c", DType::u8, {4099}},
                                  {"d", DType::f64, {1, 97, 3}},
                                  {"e", DType::f32, {1300, 1000}}};
    {
        OwnedState whole;
        for (const Spec& spec : specs) whole.add_whole(spec);
        whole.fill(7);
        Saver saver(nullptr, dir_.path(), saver_options());
        saver.save(7, whole.state);
    }
    const std::string path = exported(dir_.path());
    std::mt19937 seeds(4712);
    for (int round = 0; round < 6; ++round) {
        const uint32_t seed = seeds();
        SCOPED_TRACE("seed " + std::to_string(seed));
        expect_all_well(run_with_comm(3, [&](const std::shared_ptr<Communicator>& comm) {
            std::mt19937 random(seed);
            OwnedState owned;
            for (const Spec& spec : specs) {
                const auto dim = static_cast<int>(random() % static_cast<uint32_t>(spec.shape.ndim()));
                if (random() % 3 == 0) {
                    owned.add_whole(spec);
                } else {
                    const std::vector<Placement> placements{Placement::shard(dim)};
                    owned.add_sharded(spec, Layout::placed(spec.shape, std::vector<int>{3}, placements), comm->rank());
                }
            }
            const auto checkpoint = Checkpoint::open(path);
            for (const Verify verify : {Verify::none, Verify::blocks, Verify::blocks}) {  // the third: what is checked
                LoadOptions options = together(comm);
                options.least_shared_bytes = 0;
                options.verify = verify;
                owned.poison();
                (void)checkpoint->load(owned.state, options);
                EXPECT_EQ(owned.differences(7), 0);
            }
        }));
    }
}

TEST_P(HostReadsOfFormat, AnErrorOfOneRankIsThatOfAll) {
    const std::string path = exported(saved(dir_));
    int64_t reads = 0;
    std::mutex mutex;
    const auto is_data = [](const FaultyFiles::Call& call) {
        return call.name.starts_with("read ") && call.bytes >= 65536;
    };
    expect_all_well(load_with_faults(path, [&](const FaultyFiles::Call& call) -> Verdict {
        const std::lock_guard lock(mutex);
        reads += is_data(call) ? 1 : 0;
        return {};
    }));
    ASSERT_GE(reads, 1);
    for (int64_t at = 1; at <= reads; ++at) {
        SCOPED_TRACE(at);
        int64_t seen = 0;
        expect_on_all(load_with_faults(path,
                                       [&](const FaultyFiles::Call& call) -> Verdict {
                                           const std::lock_guard lock(mutex);
                                           return is_data(call) && ++seen == at ? Verdict{-EIO, 0} : Verdict{};
                                       }),
                      Code::io, "rank 1: cannot read " + path);
    }
}

INSTANTIATE_TEST_SUITE_P(Formats, HostReadsOfFormat,
                         ::testing::Values(ExportFormat::safetensors, ExportFormat::torch_dcp,
                                           ExportFormat::torch_save),
                         [](const auto& format) { return std::string(name_of(format.param)); });

// A part's checksum is computed by who reads it; the storage's is compared by all.
class HostReadsOfTorch : public HostReadsOfFormat {};

TEST_P(HostReadsOfTorch, DamageThatAChecksumTellsIsCorruptOnEveryRank) {
    const std::string path = exported(saved(dir_));
    const std::string file = data_file(path);
    std::string text = slurp(file);
    text[text.size() / 2] ^= 4;
    spill(file, text);
    expect_on_all(load_with_faults(path, [](const FaultyFiles::Call&) { return Verdict{}; }), Code::corrupt,
                  "do not match their checksum");
}

INSTANTIATE_TEST_SUITE_P(Formats, HostReadsOfTorch,
                         ::testing::Values(ExportFormat::torch_dcp, ExportFormat::torch_save),
                         [](const auto& format) { return std::string(name_of(format.param)); });

// Elements that would be cut at a block's edge: each rank reads for itself.
TEST(HostReads, SafetensorsWhoseElementsAreNotAlignedArriveToo) {
    const TempDir dir;
    constexpr int64_t count = 3 << 20;
    const std::string header = fmt::format(
        R"({{"odd":{{"dtype":"U8","shape":[1],"data_offsets":[0,1]}},"w":{{"dtype":"F32","shape":[{}],"data_offsets":[1,{}]}}}})",
        count, 1 + 4 * count);
    std::string text(8, '\0');
    const uint64_t size = header.size();
    std::memcpy(text.data(), &size, sizeof size);
    OwnedState whole;
    whole.add_whole({"w", DType::f32, {count}});
    whole.fill(3);
    const Tensor w = whole.state.tensors().find("w")->second.piece(0);
    text += header + "!" + std::string(reinterpret_cast<const char*>(w.data), w.size_bytes());
    spill(dir / "model.safetensors", text);
    expect_all_well(run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        owned.add_whole({"w", DType::f32, {count}});
        LoadOptions options = together(comm);
        options.unexpected = Allow::yes;
        (void)Checkpoint::open(dir / "model.safetensors")->load(owned.state, options);
        EXPECT_EQ(owned.differences(3), 0);
    }));
}

TEST(HostReads, OfOtherFormatsRanksThatLoadTogetherFailTogether) {
    const TempDir dir;
    const std::string path = saved(dir);
    const std::string plain = dir.path() + "/plain";
    Peers alone(nullptr);
    (void)export_checkpoint(*Checkpoint::open(path), alone, plain, {});
    const auto load = [&](int stranger) {
        return run_with_comm(3, [&, stranger](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            build(owned, comm->rank(), 3);
            if (comm->rank() == stranger) owned.add_whole({"z", DType::f32, {3}});
            owned.poison();
            (void)Checkpoint::open(plain)->load(owned.state, together(comm));
            EXPECT_EQ(owned.differences(1), 0);
        });
    };
    expect_all_well(load(-1));
    expect_on_all(load(2), Code::mismatch, "rank 2: ");
}

TEST(HostReads, OfOtherFormatsEqualCopiesAreOneCheckpoint) {
    const TempDir dir;
    const std::string path = saved(dir);
    for (const ExportFormat format : {ExportFormat::safetensors, ExportFormat::torch_dcp, ExportFormat::torch_save}) {
        const std::string first = fmt::format("{}/{}", dir.path(), name_of(format));
        const std::string second = first + "-copy";
        ExportOptions options;
        options.format = format;
        Peers alone(nullptr);
        (void)export_checkpoint(*Checkpoint::open(path), alone, first, options);
        std::filesystem::copy(first, second);
        for (const auto& file : std::filesystem::directory_iterator(second)) {
            std::filesystem::last_write_time(file, file.last_write_time() - std::chrono::hours(1));
        }
        expect_all_well(run_with_comm(2, [&](const std::shared_ptr<Communicator>& comm) {
            OwnedState owned;
            build(owned, comm->rank(), 2);
            owned.poison();
            (void)Checkpoint::open(comm->rank() == 0 ? first : second)->load(owned.state, together(comm));
            EXPECT_EQ(owned.differences(1), 0);
        }));
    }
}

TEST(HostReads, WithoutSharedMemoryEachRankReadsForItself) {
    const TempDir dir;
    const std::string path = saved(dir);
    CountingFiles counting;
    const auto load = [&](const std::shared_ptr<Communicator>& comm) {
        OwnedState owned;
        build(owned, comm->rank(), 2);
        owned.poison();
        (void)Checkpoint::open(path, counting.files())->load(owned.state, together(comm));
        EXPECT_EQ(owned.differences(1), 0);
    };
    expect_all_well(run_with_comm(2, load, test_options("gloo")));
    EXPECT_GT(counting.bytes(), 27 * mib);
}

}  // namespace
}  // namespace tsr::testing
