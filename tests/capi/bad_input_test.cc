// What can be wrong with peers, disks and checkpoints, as a C program sees it. Handles and tensors are in handles_test.cc
// and tensors_test.cc.
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>

#include "api.hpp"

namespace {

using ::testing::Each;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

TEST(BadInputApi, ARankThatNeverComesIsNamed) {
    tsr_store_options store_options;
    ASSERT_OK(tsr_store_options_init(&store_options, sizeof store_options));
    const std::string token(64, '5');
    store_options.token = token.c_str();
    api::Owned<tsr_store_server> server;
    ASSERT_OK(tsr_store_serve("127.0.0.1", 0, &store_options, server.out()));
    uint16_t port = 0;
    ASSERT_OK(tsr_store_server_port(server, &port));
    api::Owned<tsr_store> store;
    ASSERT_OK(tsr_store_open(("tcp://127.0.0.1:" + std::to_string(port)).c_str(), &store_options, store.out()));
    tsr_comm_options options;
    ASSERT_OK(tsr_comm_options_init(&options, sizeof options));
    options.timeout_ms = 300;
    api::Owned<tsr_comm> comm;
    EXPECT_FAILS(tsr_comm_create(store, 0, 2, &options, comm.out()), TSR_E_TIMEOUT, "rank 1");
    EXPECT_EQ(static_cast<tsr_comm*>(comm), nullptr);
}

TEST(BadInputApi, CountsThatDifferMoveNothing) {
    api::run_ranks(2, [](tsr_comm* comm, int32_t rank) {
        api::Array<float> values({rank == 0 ? 3 : 4}, 7.0F);
        const tsr_tensor tensor = values.tensor();
        EXPECT_FAILS(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, nullptr, nullptr), TSR_E_MISMATCH,
                     "rank 0 called all_reduce of 3 f32 (sum), rank 1 all_reduce of 4 f32 (sum)");
        EXPECT_THAT(values.values, Each(7.0F));
    });
}

TEST(BadInputApi, MemoryUnderTwoNamesIsNamed) {
    const auto comm = api::alone();
    api::Array<float> memory({10}, 1.0F);
    api::Array<float> other({2}, 1.0F);
    tsr_tensor first = memory.tensor();
    tsr_tensor last = first;  // from its element 8 on
    const int64_t shape = 2;
    last.shape = &shape;
    last.byte_offset = 8 * sizeof(float);
    const std::array<tsr_param, 3> params{{{"a", first}, {"b", other.tensor()}, {"c", last}}};
    const char* const said = "parameters \"a\" and \"c\" share memory";
    api::Owned<tsr_ddp> ddp;
    EXPECT_FAILS(tsr_ddp_create(comm, params.data(), params.size(), nullptr, ddp.out()), TSR_E_INVALID_ARGUMENT, said);
    const std::array<tsr_fsdp_unit, 2> units{
        {{"u", params.data(), 2, nullptr, 1, {}}, {"v", &params[2], 1, nullptr, 1, {}}}};
    api::Owned<tsr_fsdp> fsdp;
    EXPECT_FAILS(tsr_fsdp_create(comm, units.data(), units.size(), nullptr, fsdp.out()), TSR_E_INVALID_ARGUMENT, said);
    const std::array<tsr_engine_unit, 2> layers{{{"u", params.data(), 2, 0}, {"v", &params[2], 1, 0}}};
    for (const char* stage : {"0", "1", "3"}) {
        const std::string config =
            R"({"train_batch_size": 1, "optimizer": {"type": "SGD"}, "zero_optimization": {"stage": )" +
            std::string(stage) + "}}";
        api::Owned<tsr_engine> engine;
        EXPECT_FAILS(tsr_engine_create(comm, layers.data(), layers.size(), config.c_str(), nullptr, engine.out()),
                     TSR_E_INVALID_ARGUMENT, said);
    }
}

TEST(BadInputApi, NamesThatAreNotUtf8AreRefused) {
    const char* const bad = "a\xff";
    const char* const said = "is not UTF-8: \"a?\"";
    const auto comm = api::alone();
    api::Array<float> memory({2}, 1.0F);
    const tsr_tensor tensor = memory.tensor();
    const tsr_param named{"w", tensor};
    const tsr_param misnamed{bad, tensor};
    const std::string config = R"({"train_batch_size": 1, "optimizer": {"type": "SGD"}})";
    const auto refused = [&](tsr_status status, const std::string& what) {
        EXPECT_EQ(status, TSR_E_INVALID_ARGUMENT) << what;
        EXPECT_THAT(api::message(), HasSubstr(what + " " + said));
    };
    api::Owned<tsr_engine> engine;
    for (const auto& [unit, what] : {std::pair{tsr_engine_unit{bad, &named, 1, 0}, "a unit's name"},
                                     std::pair{tsr_engine_unit{"u", &misnamed, 1, 0}, "a parameter's name"}}) {
        refused(tsr_engine_create(comm, &unit, 1, config.c_str(), nullptr, engine.out()), what);
    }
    api::Owned<tsr_fsdp> fsdp;
    for (const auto& [unit, what] :
         {std::pair{tsr_fsdp_unit{bad, &named, 1, nullptr, 1, {}}, "a unit's name"},
          std::pair{tsr_fsdp_unit{"u", &misnamed, 1, nullptr, 1, {}}, "a parameter's name"}}) {
        refused(tsr_fsdp_create(comm, &unit, 1, nullptr, fsdp.out()), what);
    }
    api::Owned<tsr_ddp> ddp;
    refused(tsr_ddp_create(comm, &misnamed, 1, nullptr, ddp.out()), "a parameter's name");
    api::Owned<tsr_optimizer> sgd;
    refused(tsr_sgd_create(&misnamed, &tensor, 1, nullptr, sgd.out()), "a parameter's name");

    const tsr_engine_unit unit{"u", &named, 1, 0};
    ASSERT_OK(tsr_engine_create(comm, &unit, 1, config.c_str(), nullptr, engine.out()));
    size_t index = 0;
    refused(tsr_engine_find(engine, bad, &index), "name");
    const int32_t size = 1;
    api::Owned<tsr_mesh> mesh;
    refused(tsr_mesh_create(comm, &bad, &size, 1, mesh.out()), "a dimension's name");
    api::Owned<tsr_state> state;
    ASSERT_OK(tsr_state_create(state.out()));
    refused(tsr_state_add_tensor(state, bad, &tensor), "name");
    refused(tsr_state_set_int64(state, bad, 1), "name");
    refused(tsr_state_set_metric(state, bad, 1), "name");
    refused(tsr_state_add_engine(state, bad, engine), "prefix");
    tsr_comm_options options;
    ASSERT_OK(tsr_comm_options_init(&options, sizeof options));
    options.name = bad;
    api::Owned<tsr_comm> split;
    refused(tsr_comm_split(comm, 0, 0, &options, split.out()), "the communicator's name");
}

TEST(BadInputApi, AMissingTokenIsPermissionWithAdvice) {
    for (const char* name : {"TESSERA_TOKEN", "TESSERA_TOKEN_FD", "TESSERA_TOKEN_FILE", "TESSERA_INSECURE"}) {
        ASSERT_EQ(getenv(name), nullptr) << name;  // NOLINT(concurrency-mt-unsafe): nobody sets it
    }
    api::Owned<tsr_store> store;
    EXPECT_FAILS(tsr_store_open("tcp://192.0.2.1:1", nullptr, store.out()), TSR_E_PERMISSION, "TESSERA_TOKEN_FILE");
    api::Owned<tsr_store_server> server;
    EXPECT_FAILS(tsr_store_serve("0.0.0.0", 0, nullptr, server.out()), TSR_E_PERMISSION, "no job token");
}

// A root with one checkpoint of 1000 ones, and what a load of it says.
class BadCheckpoint : public ::testing::Test {
   protected:
    void SetUp() override {
        ASSERT_OK(tsr_saver_create(nullptr, dir_.path().c_str(), nullptr, saver_.out()));
        const tsr_tensor tensor = ones_.tensor();
        ASSERT_OK(tsr_state_create(state_.out()));
        ASSERT_OK(tsr_state_add_tensor(state_, "w", &tensor));
        ASSERT_OK(tsr_saver_save(saver_, 1, state_));
        api::Owned<tsr_checkpoint> checkpoint;
        ASSERT_OK(tsr_checkpoint_open(dir_.path().c_str(), checkpoint.out()));
        std::array<char, 4096> path{};
        size_t size = 0;
        ASSERT_OK(tsr_checkpoint_path(checkpoint, path.data(), path.size(), &size));
        path_ = path.data();
    }

    [[nodiscard]] fs::path file() const { return path_ / "rank-00000.safetensors"; }
    [[nodiscard]] fs::path manifest() const { return path_ / "manifest.json"; }

    // Changes the byte at `place` from the end.
    static void flip(const fs::path& path, int64_t place) {
        std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
        file.seekg(-place, std::ios::end);
        const int byte = file.get();
        file.seekp(-place, std::ios::end);
        file.put(static_cast<char>(byte ^ 1));
    }

    tsr_status open_and_load() {
        api::Owned<tsr_checkpoint> checkpoint;
        const tsr_status status = tsr_checkpoint_open(path_.c_str(), checkpoint.out());
        return status == TSR_OK ? tsr_checkpoint_load(checkpoint, state_, nullptr) : status;
    }

    tsr_status open_and_verify() {
        api::Owned<tsr_checkpoint> checkpoint;
        const tsr_status status = tsr_checkpoint_open(path_.c_str(), checkpoint.out());
        return status == TSR_OK ? tsr_checkpoint_verify(checkpoint, 1) : status;
    }

    api::TemporaryDirectory dir_;
    api::Array<float> ones_{{1000}, 1.0F};
    api::Owned<tsr_state> state_;
    api::Owned<tsr_saver> saver_;
    fs::path path_;
};

TEST_F(BadCheckpoint, IsSoundAtFirst) {
    EXPECT_OK(open_and_load());
    EXPECT_OK(open_and_verify());
}

TEST_F(BadCheckpoint, TruncatedIsNamed) {
    fs::resize_file(file(), fs::file_size(file()) - 8);
    EXPECT_FAILS(open_and_load(), TSR_E_CORRUPT, "rank-00000.safetensors");
    EXPECT_FAILS(open_and_verify(), TSR_E_CORRUPT, "rank-00000.safetensors");
}

TEST_F(BadCheckpoint, EditedIsNamed) {
    flip(file(), 100);
    EXPECT_FAILS(open_and_load(), TSR_E_CORRUPT, "rank-00000.safetensors");
    EXPECT_FAILS(open_and_verify(), TSR_E_CORRUPT, "rank-00000.safetensors");
    flip(file(), 100);
    flip(manifest(), 100);
    EXPECT_FAILS(open_and_load(), TSR_E_CORRUPT, "manifest.json");
}

TEST_F(BadCheckpoint, WithAFileMissingNamesIt) {
    fs::remove(file());
    EXPECT_EQ(open_and_load(), TSR_E_CORRUPT);
    EXPECT_THAT(api::message(), HasSubstr("rank-00000.safetensors"));
    EXPECT_FAILS(open_and_verify(), TSR_E_CORRUPT, "rank-00000.safetensors");
}

TEST_F(BadCheckpoint, WithAFileTooManyIsLoadedAndVerifyNamesIt) {
    fs::copy_file(file(), path_ / "rank-00001.safetensors");
    EXPECT_OK(open_and_load());
    EXPECT_FAILS(open_and_verify(), TSR_E_CORRUPT, "rank-00001.safetensors");
}

TEST_F(BadCheckpoint, WithoutManifestIsNone) {
    fs::remove(manifest());
    EXPECT_FAILS(open_and_load(), TSR_E_NOT_FOUND, "manifest");
    int64_t step = 0;
    EXPECT_FAILS(tsr_saver_resume(saver_, state_, &step), TSR_E_CORRUPT, "manifest");
}

TEST_F(BadCheckpoint, OfAnotherShapeOrDtypeIsAMismatchAndNothingIsLoaded) {
    api::Array<double> wide({1000}, 3.0);
    api::Array<float> shorter({999}, 3.0F);
    const tsr_tensor tensors[] = {wide.tensor(), shorter.tensor()};
    for (const tsr_tensor& tensor : tensors) {
        ASSERT_OK(tsr_state_create(state_.out()));
        ASSERT_OK(tsr_state_add_tensor(state_, "w", &tensor));
        EXPECT_FAILS(open_and_load(), TSR_E_MISMATCH, "'w'");
    }
    EXPECT_THAT(wide.values, Each(3.0));
    EXPECT_THAT(shorter.values, Each(3.0F));
}

TEST_F(BadCheckpoint, ASecondLiveJobIsRefusedByHostAndProcess) {
    api::Owned<tsr_saver> second;
    EXPECT_FAILS(tsr_saver_create(nullptr, dir_.path().c_str(), nullptr, second.out()), TSR_E_INVALID_STATE,
                 "another live job saves into");
    EXPECT_THAT(api::message(), HasSubstr(std::to_string(getpid())));
}

// The limit on the size of a file stands for the disk: the system refuses writes beyond it.
TEST_F(BadCheckpoint, AFullDiskLeavesTheFormerOne) {
    rlimit former{};
    ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &former), 0);
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);
    const rlimit small{1 << 20, former.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    api::Array<float> big({1 << 20}, 2.0F);
    const tsr_tensor tensor = big.tensor();
    api::Owned<tsr_state> state;
    EXPECT_OK(tsr_state_create(state.out()));
    EXPECT_OK(tsr_state_add_tensor(state, "w", &tensor));
    const tsr_status status = tsr_saver_save(saver_, 2, state);
    const std::string message = api::message();
    int32_t domain = 0;
    EXPECT_EQ(tsr_error_native(tsr_error_last(), &domain), EFBIG);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &former), 0);
    std::signal(SIGXFSZ, handler);
    EXPECT_EQ(status, TSR_E_IO) << message;
    EXPECT_THAT(message, HasSubstr(dir_.path().string()));
    EXPECT_EQ(domain, TSR_NATIVE_ERRNO);

    ones_.values.assign(1000, 0.0F);
    int64_t step = 0;
    EXPECT_OK(tsr_saver_resume(saver_, state_, &step));
    EXPECT_EQ(step, 1);
    EXPECT_THAT(ones_.values, Each(1.0F));
    EXPECT_OK(tsr_saver_save(saver_, 3, state_));
}

}  // namespace
