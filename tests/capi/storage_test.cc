// tessera/storage.h: checkpoints in a storage of the program's own.
#include <chrono>
#include <mutex>
#include <numeric>
#include <thread>

#include "api.hpp"
#include "memory_storage.hpp"
#include "patience.hpp"
#include "sampling.hpp"
#include "sanitized.hpp"
#include "seed.hpp"

namespace {

using api::MemoryStorage;
using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr int32_t all_capabilities = TSR_STORAGE_PARTS_IN_ANY_ORDER | TSR_STORAGE_PUT_IF_ABSENT;
constexpr int64_t rows = 1001;
constexpr int64_t default_columns = 257;

// Rank `rank`'s rows of a matrix of which every element tells its place and the step.
class Rows {
   public:
    Rows(int32_t rank, int32_t world, int64_t width = default_columns) : columns_(width) {
        const std::array<int64_t, 2> shape{rows, columns_};
        const tsr_placement shard{TSR_PLACE_SHARD, 0};
        EXPECT_OK(tsr_layout_create(shape.data(), 2, &world, &shard, 1, layout_.out()));
        tsr_box box{};
        EXPECT_OK(tsr_layout_box(layout_, rank, 0, &box));
        first_ = box.offsets[0];
        part_ = api::Array<float>({box.sizes[0], columns_}, 0.0F);
        const tsr_tensor piece = part_.tensor();
        EXPECT_OK(tsr_state_create(state.out()));
        EXPECT_OK(tsr_state_add_sharded(state, "w", layout_, TSR_DTYPE_F32, &piece, rank));
    }

    void fill(int64_t step) {
        for (size_t i = 0; i < part_.values.size(); ++i) part_.values[i] = value(i, step);
    }
    [[nodiscard]] bool holds(int64_t step) const {
        for (size_t i = 0; i < part_.values.size(); ++i) {
            if (part_.values[i] != value(i, step)) return false;
        }
        return true;
    }

    api::Owned<tsr_state> state;

   private:
    int64_t columns_;
    [[nodiscard]] float value(size_t i, int64_t step) const {
        return static_cast<float>(first_ * columns_ + static_cast<int64_t>(i)) + 0.25F * static_cast<float>(step);
    }

    api::Owned<tsr_layout> layout_;
    api::Array<float> part_{std::vector<float>{}};
    int64_t first_ = 0;
};

tsr_saver_options saver_options(const tsr_storage* storage) {
    tsr_saver_options options;
    EXPECT_OK(tsr_saver_options_init(&options, sizeof options));
    EXPECT_EQ(options.storage, nullptr);
    options.storage = storage;
    options.timeout_ms = tsr::testing::patience_ms(30000);
    return options;
}

tsr_status open_in(const tsr_storage* storage, const char* path, tsr_checkpoint** out) {
    tsr_open_options options;
    EXPECT_OK(tsr_open_options_init(&options, sizeof options));
    options.storage = storage;
    return tsr_checkpoint_open_with(path, &options, out);
}

std::string step_name(int64_t step) {
    std::string digits = std::to_string(step);
    return "step-" + std::string(8 - digits.size(), '0') + digits;
}

int64_t step_of(const tsr_checkpoint* checkpoint) {
    int64_t step = -2;
    EXPECT_OK(tsr_checkpoint_step(checkpoint, &step));
    return step;
}

// Saves `steps`, the odd ones in the background.
void save_steps(const tsr_storage* storage, int32_t world, const std::vector<int64_t>& steps,
                const std::function<void(tsr_saver_options&)>& change = {}) {
    api::run_ranks(world, [&](tsr_comm* comm, int32_t rank) {
        tsr_saver_options options = saver_options(storage);
        if (change) change(options);
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(comm, "runs/a", &options, saver.out()));
        Rows state(rank, world);
        for (const int64_t step : steps) {
            state.fill(step);
            EXPECT_OK(tsr_state_set_metric(state.state, "loss", step == 3 ? 0.5 : 1.0));
            if (step % 2 == 0) {
                ASSERT_OK(tsr_saver_save(saver, step, state.state));
            } else {
                ASSERT_OK(tsr_saver_save_async(saver, step, state.state, nullptr));
                state.fill(-1);
            }
        }
        ASSERT_OK(tsr_saver_wait(saver));
    });
}

void expect_newest(const tsr_storage* storage, int32_t world, int64_t step) {
    api::run_ranks(world, [&](tsr_comm* comm, int32_t rank) {
        const tsr_saver_options options = saver_options(storage);
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(comm, "runs/a", &options, saver.out()));
        Rows state(rank, world);
        int64_t found = -1;
        ASSERT_OK(tsr_saver_resume(saver, state.state, &found));
        EXPECT_EQ(found, step);
        EXPECT_TRUE(state.holds(step)) << "on rank " << rank;
    });
}

// The process whose saver failed is this one, and lives. After a real death a later saver takes the root over and
// collects what was left.
void forget_dead_writers(MemoryStorage& memory) {
    memory.edit([](std::map<std::string, std::string>& contents) {
        std::erase_if(contents, [&](const auto& object) {
            const std::string directory = object.first.substr(0, object.first.rfind('/'));
            return object.first.starts_with("runs/a/.owner") ||
                   (directory != "runs/a" && !contents.contains(directory + "/manifest.json"));
        });
    });
}

// A save, and who makes it.
struct Kind {
    int32_t ranks = 1;
    bool in_background = false;
    const char* format = nullptr;

    [[nodiscard]] std::string name() const {
        return std::string(in_background ? "InBackground" : "AtOnce") + (format == nullptr ? "Native" : "TorchDcp");
    }
};

void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name(); }

// What a rank was told of a save.
struct Told {
    tsr_status status = TSR_OK;
    std::string message;
    int32_t native = 0;

    Told() = default;
    explicit Told(tsr_status returned) : status(returned) {
        if (status == TSR_OK) return;
        message = api::message();
        native = tsr_error_native(tsr_error_last(), nullptr);
    }
};

// By its work; the saver says the same, once.
Told save_in_background(tsr_saver* saver, Rows& state, int64_t step) {
    api::Owned<tsr_work> work;
    const Told at_once(tsr_saver_save_async(saver, step, state.state, work.out()));
    state.fill(-1);
    if (at_once.status != TSR_OK) return at_once;
    Told told(tsr_work_wait(work, tsr::testing::patience_ms(60000)));
    const Told once(tsr_saver_wait(saver));
    EXPECT_EQ(once.status, told.status);
    EXPECT_EQ(once.message, told.message);
    EXPECT_OK(tsr_saver_wait(saver));
    return told;
}

enum class Fault { once, from_there_on };

// Saves step after step while a call of the storage fails, the next one each time; as if the network failed once, or
// the process died, and nothing can be tidied up any more. Whichever call it is, the former checkpoint stands, or the
// new one if it was committed, and all ranks are told the same.
void expect_faults_at_each_call_are_told(MemoryStorage& memory, const tsr_storage* storage, const Kind& kind,
                                         Fault fault) {
    const bool once = fault == Fault::once;
    int failures = 0;
    int64_t step = 2;
    const int64_t apart = tsr::testing::sanitized && !tsr::testing::takes_all() ? 5 : 1;
    for (int64_t call = tsr::testing::Seed() % apart;; call += apart, step += 2) {
        const auto change = [&](tsr_saver_options& options) {
            options.keep_latest = 1;
            options.format = kind.format;
        };
        save_steps(storage, kind.ranks, {step}, change);
        const int32_t returned = !once ? TSR_E_IO : call % 2 == 0 ? -77 : TSR_E_TIMEOUT;
        std::vector<Told> told(static_cast<size_t>(kind.ranks));
        int64_t calls = 0;
        std::mutex mutex;
        int32_t done = 0;
        api::run_ranks(kind.ranks, [&](tsr_comm* comm, int32_t rank) {
            tsr_saver_options options = saver_options(storage);
            change(options);
            api::Owned<tsr_saver> saver;
            ASSERT_OK(tsr_saver_create(comm, "runs/a", &options, saver.out()));
            Rows state(rank, kind.ranks);
            state.fill(step + 1);
            if (rank == 0 && once) memory.fail_at(call, returned);
            if (rank == 0 && !once) memory.fail_from(call, returned);
            told[static_cast<size_t>(rank)] = kind.in_background ? save_in_background(saver, state, step + 1)
                                                                 : Told(tsr_saver_save(saver, step + 1, state.state));
            const std::lock_guard lock(mutex);
            if (++done < kind.ranks) return;
            calls = memory.calls();
            if (once) memory.fail_at(-1, TSR_OK);
        });
        memory.fail_at(-1, TSR_OK);
        const std::vector<std::string> keys = memory.keys();
        forget_dead_writers(memory);
        SCOPED_TRACE("call " + std::to_string(call) + ": " + memory.failed_call());
        const tsr_status status = told[0].status;
        for (const Told& of_rank : told) {
            EXPECT_EQ(of_rank.status, status);
            if (status == TSR_OK) continue;
            EXPECT_EQ(of_rank.status, returned == -77 ? TSR_E_USER : returned);
            EXPECT_EQ(of_rank.native, returned == -77 ? -77 : 0);
            EXPECT_THAT(of_rank.message, HasSubstr("injected into " + (once ? memory.failed_call() : "")));
        }
        if (status != TSR_OK) ++failures;
        if (status != TSR_OK && once) {
            EXPECT_THAT(keys, Not(Contains(HasSubstr(step_name(step + 1))))) << "nothing is left of a save that failed";
        }
        expect_newest(storage, kind.ranks, status == TSR_OK ? step + 1 : step);
        if (::testing::Test::HasFailure() || calls <= call) break;
    }
    EXPECT_GE(failures, 10 * kind.ranks / apart) << "few calls failed: does the storage see the saves at all?";
}

class StorageOfEachKind : public ::testing::TestWithParam<int32_t> {
   protected:
    MemoryStorage memory{{GetParam(), 65536}};
    api::Owned<tsr_storage> storage = memory.handle();
};

TEST_P(StorageOfEachKind, HoldsWhatThreeRanksSaveAndTwoLoad) {
    save_steps(storage, 3, {1, 2, 3});
    EXPECT_GT(memory.largest_part_count(), 3) << "rank files of several parts";
    EXPECT_THAT(memory.keys(), Each(StartsWith("runs/a/")));
    EXPECT_THAT(memory.keys(), Not(Contains(HasSubstr("/."))));
    expect_newest(storage, 2, 3);

    api::Owned<tsr_checkpoint> checkpoint;
    ASSERT_OK(open_in(storage, "/runs/a/latest", checkpoint.out()));
    EXPECT_EQ(step_of(checkpoint), 3);
    EXPECT_OK(tsr_checkpoint_verify(checkpoint, 1));
    api::Array<float> whole({rows, default_columns}, 0.0F);
    const tsr_tensor into = whole.tensor();
    storage.reset();  // the checkpoint keeps what it needs
    ASSERT_OK(tsr_checkpoint_read(checkpoint, "w", &into));
    EXPECT_EQ(whole.values[default_columns], default_columns + 0.75F);
}

TEST_P(StorageOfEachKind, SurvivesAnErrorAtEachCallOfASave) {
    expect_faults_at_each_call_are_told(memory, storage, {.ranks = 2}, Fault::once);
}

TEST_P(StorageOfEachKind, SurvivesAStorageThatIsGoneFromAnyCallOn) {
    expect_faults_at_each_call_are_told(memory, storage, {.ranks = 2}, Fault::from_there_on);
}

TEST_P(StorageOfEachKind, SavesInPyTorchsFormat) {
    save_steps(storage, 2, {1, 2}, [](tsr_saver_options& options) { options.format = "torch_dcp"; });
    EXPECT_THAT(memory.keys(), Contains(HasSubstr("/.metadata")));
    expect_newest(storage, 3, 2);
}

INSTANTIATE_TEST_SUITE_P(All, StorageOfEachKind,
                         ::testing::Values(0, TSR_STORAGE_PARTS_IN_ANY_ORDER, TSR_STORAGE_PUT_IF_ABSENT,
                                           all_capabilities));

class SaveOfEachKind : public ::testing::TestWithParam<Kind> {
   protected:
    MemoryStorage memory;
    api::Owned<tsr_storage> storage = memory.handle();
};

TEST_P(SaveOfEachKind, SurvivesAnErrorAtEachCall) {
    expect_faults_at_each_call_are_told(memory, storage, GetParam(), Fault::once);
}

TEST_P(SaveOfEachKind, SurvivesAStorageThatIsGoneFromAnyCallOn) {
    expect_faults_at_each_call_are_told(memory, storage, GetParam(), Fault::from_there_on);
}

INSTANTIATE_TEST_SUITE_P(All, SaveOfEachKind,
                         ::testing::Values(Kind{3}, Kind{3, true}, Kind{3, false, "torch_dcp"},
                                           Kind{3, true, "torch_dcp"}),
                         [](const auto& kind) { return kind.param.name(); });

TEST(StorageApi, TellsOfAnErrorAtEachCallOfALoad) {
    MemoryStorage memory;
    const api::Owned<tsr_storage> storage = memory.handle();
    save_steps(storage, 2, {2});
    int failures = 0;
    for (int64_t call = 0;; ++call) {
        memory.fail_at(call, 1234);
        Rows state(0, 1);
        api::Owned<tsr_checkpoint> checkpoint;
        tsr_status status = open_in(storage, "runs/a", checkpoint.out());
        if (status == TSR_OK) status = tsr_checkpoint_load(checkpoint, state.state, nullptr);
        if (status == TSR_OK) {
            EXPECT_TRUE(state.holds(2));
            if (memory.calls() <= call) break;
            continue;  // `latest` is a hint: that it cannot be read stops nobody
        }
        ++failures;
        int32_t domain = 0;
        EXPECT_EQ(status, TSR_E_USER) << memory.failed_call();
        EXPECT_EQ(tsr_error_native(tsr_error_last(), &domain), 1234);
        EXPECT_EQ(domain, TSR_NATIVE_USER);
        EXPECT_THAT(api::message(), HasSubstr("injected into"));
    }
    EXPECT_GT(failures, 5);
}

TEST(StorageApi, RanksThatLoadTogetherReadEachByteOnce) {
    constexpr int64_t saved_bytes = int64_t{12} << 20;
    constexpr int32_t ranks = 3;
    MemoryStorage storage;
    const auto handle = storage.handle();
    for (const std::string root : {"a", "b"}) {
        api::Array<float> w({saved_bytes / 4}, 2.0F);
        const auto state = api::state_of("w", w);
        tsr_saver_options options;
        ASSERT_OK(tsr_saver_options_init(&options, sizeof options));
        options.storage = handle;
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(nullptr, root.c_str(), &options, saver.out()));
        ASSERT_OK(tsr_saver_save(saver, 1, state));
    }
    tsr_open_options open;
    ASSERT_OK(tsr_open_options_init(&open, sizeof open));
    open.storage = handle;
    for (const bool together : {true, false}) {
        const int64_t before = storage.bytes_read();
        api::run_ranks(ranks, [&](tsr_comm* comm, int32_t) {
            api::Owned<tsr_checkpoint> checkpoint;
            ASSERT_OK(tsr_checkpoint_open_with("a", &open, checkpoint.out()));
            api::Array<float> w({saved_bytes / 4}, 0.0F);
            const auto state = api::state_of("w", w);
            tsr_load_options load;
            ASSERT_OK(tsr_load_options_init(&load, sizeof load));
            EXPECT_EQ(load.comm, nullptr);
            if (together) load.comm = comm;
            ASSERT_OK(tsr_checkpoint_load(checkpoint, state, &load));
            EXPECT_THAT(w.values, Each(2.0F));
            EXPECT_OK(tsr_comm_barrier(comm, nullptr));
        });
        const int64_t read = storage.bytes_read() - before;
        const int64_t copies = together ? 1 : ranks;
        EXPECT_GE(read, copies * saved_bytes);
        EXPECT_LE(read, copies * saved_bytes + ranks * 65536);  // manifest and header of each rank
    }
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        api::Owned<tsr_checkpoint> checkpoint;
        ASSERT_OK(tsr_checkpoint_open_with(rank == 0 ? "a" : "b", &open, checkpoint.out()));
        api::Owned<tsr_state> state;
        ASSERT_OK(tsr_state_create(state.out()));
        tsr_load_options load;
        ASSERT_OK(tsr_load_options_init(&load, sizeof load));
        load.comm = comm;
        EXPECT_FAILS(tsr_checkpoint_load(checkpoint, state, &load), TSR_E_MISMATCH, "rank 1 loads b/step-00000001-");
    });
}

TEST(StorageApi, FindsTruncatedAndMissingObjects) {
    MemoryStorage memory;
    const api::Owned<tsr_storage> storage = memory.handle();
    save_steps(storage, 2, {2});
    const auto edit = [&](const std::string& end, const std::function<void(std::string&)>& change) {
        memory.edit([&](std::map<std::string, std::string>& contents) {
            for (auto& [key, data] : contents) {
                if (key.ends_with(end)) change(data);
            }
        });
    };
    Rows state(0, 1);
    api::Owned<tsr_checkpoint> checkpoint;
    edit("rank-00001.safetensors", [](std::string& data) { data.pop_back(); });
    ASSERT_OK(open_in(storage, "runs/a", checkpoint.out()));
    EXPECT_FAILS(tsr_checkpoint_load(checkpoint, state.state, nullptr), TSR_E_CORRUPT, "truncated");
    EXPECT_FAILS(tsr_checkpoint_verify(checkpoint, 0), TSR_E_CORRUPT, "rank-00001.safetensors");
    edit("rank-00001.safetensors", [](std::string& data) { data.push_back('\x55'); });
    EXPECT_FAILS(tsr_checkpoint_verify(checkpoint, 1), TSR_E_CORRUPT, "do not match their checksum");
    memory.edit([](auto& contents) {
        std::erase_if(contents, [](const auto& one) { return one.first.ends_with("1.safetensors"); });
    });
    EXPECT_FAILS(tsr_checkpoint_load(checkpoint, state.state, nullptr), TSR_E_NOT_FOUND, "rank-00001.safetensors");
    edit("manifest.json", [](std::string& data) { data.resize(data.size() / 2); });
    EXPECT_FAILS(open_in(storage, "runs/a", checkpoint.out()), TSR_E_CORRUPT, "manifest.json");
    memory.edit([](auto& contents) {
        std::erase_if(contents, [](const auto& one) { return one.first.ends_with("manifest.json"); });
    });
    EXPECT_FAILS(open_in(storage, "runs/a", checkpoint.out()), TSR_E_CORRUPT, "names it as the newest save");
    EXPECT_FAILS(open_in(storage, "runs/b", checkpoint.out()), TSR_E_NOT_FOUND, "no checkpoint at runs/b");
}

TEST(StorageApi, KeepsTheNewestAndTheBest) {
    MemoryStorage memory;
    const api::Owned<tsr_storage> storage = memory.handle();
    save_steps(storage, 1, {1, 2, 3, 4, 5, 6}, [](tsr_saver_options& options) {
        options.keep_latest = 2;
        options.best_metric = "loss";
        options.keep_best = 1;
    });
    api::Owned<tsr_checkpoint> checkpoint;
    ASSERT_OK(open_in(storage, "runs/a/best", checkpoint.out()));
    EXPECT_EQ(step_of(checkpoint), 3);
    ASSERT_OK(open_in(storage, "runs/a", checkpoint.out()));
    EXPECT_EQ(step_of(checkpoint), 6);
    EXPECT_EQ(memory.keys().size(), 2U + 3U * 2U) << "latest, best; a manifest and a rank file each of 3, 5 and 6";
}

TEST(StorageApi, RefusesASecondLiveJob) {
    for (const int32_t capabilities : {0, all_capabilities}) {
        MemoryStorage memory({capabilities, 65536});
        const api::Owned<tsr_storage> storage = memory.handle();
        const tsr_saver_options options = saver_options(storage);
        api::Owned<tsr_saver> first;
        ASSERT_OK(tsr_saver_create(nullptr, "runs/a", &options, first.out()));
        api::Owned<tsr_saver> second;
        EXPECT_FAILS(tsr_saver_create(nullptr, "runs/a", &options, second.out()), TSR_E_INVALID_STATE,
                     "another live job saves into runs/a");
        first.reset();
        EXPECT_OK(tsr_saver_create(nullptr, "runs/a", &options, second.out()));
    }
}

// Without a conditional put two may take a root at once: who put its lease last has it.
TEST(StorageApi, TheLoserOfARaceForARootDoesNotSave) {
    MemoryStorage memory({0, 65536});
    const api::Owned<tsr_storage> storage = memory.handle();
    const tsr_saver_options options = saver_options(storage);
    api::Owned<tsr_saver> loser;
    ASSERT_OK(tsr_saver_create(nullptr, "runs/a", &options, loser.out()));
    memory.edit([](auto& contents) { contents.at("runs/a/.owner").replace(7, 4, "zzzz"); });
    Rows state(0, 1);
    EXPECT_FAILS(tsr_saver_save(loser, 1, state.state), TSR_E_INVALID_STATE, "taken over by another job");
    EXPECT_THAT(memory.keys(), Each(HasSubstr(".owner")));
}

TEST(StorageApi, StagesInARingWhateverTheOrderOfParts) {
    MemoryStorage any_order;
    MemoryStorage in_order({0, 65536});
    for (MemoryStorage* memory : {&any_order, &in_order}) {
        const api::Owned<tsr_storage> storage = memory->handle();
        Rows state(0, 1, 16 * default_columns);  // 16 MiB
        {
            tsr_saver_options options = saver_options(storage);
            options.staging_bytes = int64_t{8} << 20;
            api::Owned<tsr_saver> saver;
            ASSERT_OK(tsr_saver_create(nullptr, "runs/a", &options, saver.out()));
            state.fill(1);
            ASSERT_OK(tsr_saver_save_async(saver, 1, state.state, nullptr));
            state.fill(-1);
            ASSERT_OK(tsr_saver_wait(saver));
        }
        api::Owned<tsr_checkpoint> checkpoint;
        ASSERT_OK(open_in(storage, "runs/a", checkpoint.out()));
        ASSERT_OK(tsr_checkpoint_load(checkpoint, state.state, nullptr));
        EXPECT_TRUE(state.holds(1));
    }
}

// A storage whose program does something else in the midst of a part, once.
class Meddling : public MemoryStorage {
   public:
    api::Owned<tsr_storage> meddling_handle() {
        tsr_storage_vtable table = vtable();
        table.part = on_part;
        api::Owned<tsr_storage> storage;
        EXPECT_OK(tsr_storage_create(&table, static_cast<MemoryStorage*>(this), nullptr, storage.out()));
        return storage;
    }
    std::function<void()> meddle;

   private:
    static int32_t on_part(void* upload, int64_t index, int64_t offset, const void* data, int64_t size, char* message,
                           void* user_data) {
        auto& self = *static_cast<Meddling*>(static_cast<MemoryStorage*>(user_data));
        if (!self.done_.exchange(true)) self.meddle();
        return self.vtable().part(upload, index, offset, data, size, message, user_data);
    }
    std::atomic<bool> done_{false};
};

TEST(StorageApi, ACallbackThatUsesItsSaverIsRefusedAndMayDestroyIt) {
    for (const bool in_background : {true, false}) {
        Meddling memory;
        api::Owned<tsr_storage> storage = memory.meddling_handle();
        const tsr_saver_options options = saver_options(storage);
        tsr_saver* saver = nullptr;
        ASSERT_OK(tsr_saver_create(nullptr, "runs/a", &options, &saver));
        Rows state(0, 1);
        state.fill(1);
        Rows other(0, 1);
        memory.meddle = [&] {
            int64_t step = 0;
            int32_t stop = 0;
            EXPECT_EQ(tsr_saver_wait(saver), TSR_E_INVALID_STATE);
            EXPECT_THAT(api::message(), HasSubstr("callback"));
            EXPECT_EQ(tsr_saver_save(saver, 2, other.state), TSR_E_INVALID_STATE);
            EXPECT_EQ(tsr_saver_save_async(saver, 2, other.state, nullptr), TSR_E_INVALID_STATE);
            EXPECT_EQ(tsr_saver_resume(saver, other.state, &step), TSR_E_INVALID_STATE);
            EXPECT_EQ(tsr_saver_should_stop(saver, 1, 0, &stop), TSR_E_INVALID_STATE);
            tsr_saver_destroy(saver);
        };
        if (in_background) {
            api::Owned<tsr_work> work;
            ASSERT_OK(tsr_saver_save_async(saver, 1, state.state, work.out()));
            ASSERT_OK(tsr_work_wait(work, tsr::testing::patience_ms(30000)));
        } else {
            ASSERT_OK(tsr_saver_save(saver, 1, state.state));
        }
        EXPECT_FAILS(tsr_saver_wait(saver), TSR_E_INVALID_STATE, "destroyed");
        // The root is given back a moment after the save.
        api::Owned<tsr_saver> next;
        ASSERT_TRUE(api::becomes_true([&] {
            return tsr_saver_create(nullptr, "runs/a", &options, next.out()) == TSR_OK;
        })) << api::message();
        int64_t step = 0;
        EXPECT_OK(tsr_saver_resume(next, other.state, &step));
        EXPECT_EQ(step, 1);
        EXPECT_TRUE(other.holds(1));
    }
}

TEST(StorageApi, NumbersThatCannotBeAreTold) {
    static int64_t size;
    static int64_t modified_ms;
    MemoryStorage memory;
    tsr_storage_vtable table = memory.vtable();
    table.status = [](const char*, int32_t* kind, int64_t* bytes, int64_t* modified, char*, void*) -> int32_t {
        *kind = TSR_STORAGE_OBJECT;
        *bytes = size;
        *modified = modified_ms;
        return TSR_OK;
    };
    table.open = [](const char*, void** object, int64_t* bytes, char*, void*) -> int32_t {
        *object = nullptr;
        *bytes = size;
        return TSR_OK;
    };
    table.close = [](void*, void*) {};
    api::Owned<tsr_storage> storage;
    ASSERT_OK(tsr_storage_create(&table, &memory, nullptr, storage.out()));
    api::Owned<tsr_checkpoint> checkpoint;
    for (const int64_t bytes : {int64_t{-1}, INT64_MIN}) {
        size = bytes;
        EXPECT_FAILS(open_in(storage, "runs/a.safetensors", checkpoint.out()), TSR_E_IO,
                     "negative size " + std::to_string(bytes));
    }
    size = 100;
    for (const int64_t time : {INT64_MAX, INT64_MIN}) {
        modified_ms = time;
        EXPECT_FAILS(open_in(storage, "runs/a.safetensors", checkpoint.out()), TSR_E_IO, std::to_string(time) + " ms");
    }
}

TEST(StorageApi, ChecksTheVtable) {
    MemoryStorage memory;
    const tsr_storage_vtable good = memory.vtable();
    api::Owned<tsr_storage> storage;
    const auto create = [&](const std::function<void(tsr_storage_vtable&)>& change) {
        tsr_storage_vtable table = good;
        change(table);
        return tsr_storage_create(&table, &memory, nullptr, storage.out());
    };
    EXPECT_FAILS(create([](auto& table) { table.list = nullptr; }), TSR_E_INVALID_ARGUMENT, "vtable.list is NULL");
    EXPECT_FAILS(create([](auto& table) { table.drop = nullptr; }), TSR_E_INVALID_ARGUMENT, "vtable.drop is NULL");
    EXPECT_FAILS(create([](auto& table) { table.part_bytes = 100; }), TSR_E_INVALID_ARGUMENT, "part_bytes is 100");
    EXPECT_FAILS(create([](auto& table) { table.capabilities = 64; }), TSR_E_UNSUPPORTED, "capabilities is 64");
    EXPECT_FAILS(create([](auto& table) { table.struct_size = 0; }), TSR_E_INVALID_ARGUMENT, "struct_size");
    EXPECT_FAILS(tsr_storage_create(nullptr, nullptr, nullptr, storage.out()), TSR_E_INVALID_ARGUMENT,
                 "vtable is NULL");
    EXPECT_FAILS(tsr_storage_create(&good, nullptr, nullptr, nullptr), TSR_E_INVALID_ARGUMENT, "out is NULL");
    tsr_open_options options{};
    api::Owned<tsr_checkpoint> checkpoint;
    EXPECT_FAILS(tsr_checkpoint_open_with("x", &options, checkpoint.out()), TSR_E_INVALID_ARGUMENT, "struct_size");
    EXPECT_FAILS(tsr_checkpoint_open_with("no/such/path", nullptr, checkpoint.out()), TSR_E_NOT_FOUND, "no/such/path");
}

TEST(StorageApi, DestroysItsDataWhenNothingUsesItAnyMore) {
    struct Data {
        MemoryStorage memory;
        int destroyed = 0;
    } data;
    // The callbacks see the storage itself; what counts the destroys stands beside it.
    static Data* counted = &data;
    counted = &data;
    const tsr_storage_vtable table = data.memory.vtable();
    api::Owned<tsr_storage> storage;
    ASSERT_OK(tsr_storage_create(&table, &data.memory, [](void*) { ++counted->destroyed; }, storage.out()));
    save_steps(storage, 1, {2});
    api::Owned<tsr_checkpoint> checkpoint;
    ASSERT_OK(open_in(storage, "runs/a", checkpoint.out()));
    const tsr_saver_options options = saver_options(storage);
    api::Owned<tsr_saver> saver;
    ASSERT_OK(tsr_saver_create(nullptr, "runs/a", &options, saver.out()));
    storage.reset();
    checkpoint.reset();
    EXPECT_EQ(data.destroyed, 0) << "a saver uses it";
    saver.reset();
    EXPECT_EQ(data.destroyed, 1);
}

}  // namespace
