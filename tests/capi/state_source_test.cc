// Objects of the program's in a state: when their callbacks run, what their errors become, who owns their data.
#include <set>

#include "api.hpp"

namespace {

using ::testing::HasSubstr;

// An object with an integer, a double and a text; what its callbacks do besides can be said.
struct Loader {
    int64_t epoch = 0;
    double rate = 0;
    std::string note = R"("")";
    std::vector<std::string> calls;
    std::set<std::thread::id> threads;
    int destroyed = 0;
    std::function<int32_t(tsr_state* values, char* message)> on_collect = [](tsr_state*, char*) { return TSR_OK; };
    std::function<int32_t(const tsr_state* values, char* message)> on_check = [](const tsr_state*, char*) {
        return TSR_OK;
    };
    std::function<int32_t(char* message)> on_apply = [](char*) { return TSR_OK; };

    [[nodiscard]] tsr_state_source source() {
        tsr_state_source out{};
        out.struct_size = sizeof out;
        out.collect = [](tsr_state* values, char* message, void* self) {
            return of(self, "collect").give(values, message);
        };
        out.check = [](const tsr_state* values, char* message, void* self) {
            return of(self, "check").on_check(values, message);
        };
        out.apply = [](const tsr_state* values, char* message, void* self) {
            return of(self, "apply").take(values, message);
        };
        out.destroy = [](void* self) { ++static_cast<Loader*>(self)->destroyed; };
        out.user_data = this;
        return out;
    }
    [[nodiscard]] tsr_status add_to(tsr_state* state, const char* prefix = "loader") {
        const tsr_state_source callbacks = source();
        return tsr_state_add_source(state, prefix, &callbacks);
    }

   private:
    static Loader& of(void* self, const char* call) {
        auto& loader = *static_cast<Loader*>(self);
        loader.calls.emplace_back(call);
        loader.threads.insert(std::this_thread::get_id());
        return loader;
    }
    int32_t give(tsr_state* values, char* message) {
        EXPECT_OK(tsr_state_set_int64(values, "epoch", epoch));
        EXPECT_OK(tsr_state_set_double(values, "rate", rate));
        EXPECT_OK(tsr_state_set_value(values, "note", note.c_str()));
        return on_collect(values, message);
    }
    int32_t take(const tsr_state* values, char* message) {
        if (const int32_t failed = on_apply(message); failed != TSR_OK) return failed;
        EXPECT_OK(tsr_state_get_int64(values, "epoch", &epoch));
        EXPECT_OK(tsr_state_get_double(values, "rate", &rate));
        size_t size = 0;
        std::string text(64, '\0');
        EXPECT_OK(tsr_state_get_value(values, "note", text.data(), text.size(), &size));
        note = text.substr(0, size - 1);
        return TSR_OK;
    }
};

int32_t says(char* message, const char* text, int32_t status) {
    std::strcpy(message, text);
    return status;
}

// A state of a tensor and a loader, and a saver of one rank.
struct StateSource : ::testing::Test {
    api::TemporaryDirectory directory;
    api::Array<float> weights{{4}, 1.0F};
    Loader loader;
    api::Owned<tsr_state> state = api::state_of("w", weights);
    api::Owned<tsr_saver> saver;

    void SetUp() override {
        ASSERT_OK(loader.add_to(state));
        ASSERT_OK(tsr_saver_create(nullptr, directory.path().c_str(), nullptr, saver.out()));
    }
    [[nodiscard]] tsr_status resume() {
        int64_t step = 0;
        return tsr_saver_resume(saver, state, &step);
    }
    [[nodiscard]] tsr_status load(const tsr_load_options* options = nullptr) {
        api::Owned<tsr_checkpoint> checkpoint;
        EXPECT_OK(tsr_checkpoint_open(directory.path().c_str(), checkpoint.out()));
        return tsr_checkpoint_load(checkpoint, state, options);
    }
};

TEST_F(StateSource, IsCollectedAtASaveAndGivenBackAtALoad) {
    loader.epoch = 3;
    loader.rate = 0.25;
    loader.note = R"({"~":"tuple","v":[1,"two"]})";
    ASSERT_OK(tsr_saver_save(saver, 1, state));
    EXPECT_EQ(loader.calls, (std::vector<std::string>{"collect"}));
    loader.calls.clear();
    loader.epoch = 9;
    loader.rate = -1;
    loader.note = "null";
    ASSERT_OK(resume());
    EXPECT_EQ(loader.calls, (std::vector<std::string>{"collect", "check", "apply"}));
    EXPECT_EQ(loader.epoch, 3);
    EXPECT_EQ(loader.rate, 0.25);
    EXPECT_EQ(loader.note, R"({"~":"tuple","v":[1,"two"]})");
    EXPECT_EQ(loader.threads, std::set{std::this_thread::get_id()});
    int64_t epoch = 0;
    EXPECT_OK(tsr_state_get_int64(state, "loader.epoch", &epoch));
    EXPECT_EQ(epoch, 3);
}

TEST_F(StateSource, IsAskedByABackgroundSaveBeforeThatReturns) {
    loader.epoch = 3;
    ASSERT_OK(tsr_saver_save_async(saver, 1, state, nullptr));
    loader.epoch = 4;
    EXPECT_EQ(loader.threads, std::set{std::this_thread::get_id()});
    ASSERT_OK(resume());
    EXPECT_EQ(loader.epoch, 3);
}

TEST_F(StateSource, ThatRefusesAtCheckLeavesAllAsItWas) {
    loader.epoch = 3;
    ASSERT_OK(tsr_state_set_int64(state, "more", 1));
    ASSERT_OK(tsr_saver_save(saver, 1, state));
    loader.epoch = 9;
    weights.values.assign(4, 7.0F);
    ASSERT_OK(tsr_state_set_int64(state, "more", 2));
    loader.on_check = [](const tsr_state* values, char* message) {
        int64_t epoch = 0;
        EXPECT_OK(tsr_state_get_int64(values, "epoch", &epoch));
        EXPECT_EQ(epoch, 3);
        return says(message, "epoch 3 is too early", TSR_E_MISMATCH);
    };
    EXPECT_FAILS(resume(), TSR_E_MISMATCH, "'loader' refused the values of the checkpoint: epoch 3 is too early");
    EXPECT_EQ(weights.values, std::vector(4, 7.0F));
    EXPECT_EQ(loader.epoch, 9);
    int64_t more = 0;
    EXPECT_OK(tsr_state_get_int64(state, "more", &more));
    EXPECT_EQ(more, 2);
}

TEST_F(StateSource, ThatFailsAtApplyFailsTheLoad) {
    ASSERT_OK(tsr_saver_save(saver, 1, state));
    loader.on_apply = [](char* message) { return says(message, "no room", TSR_E_NO_MEMORY); };
    EXPECT_FAILS(resume(), TSR_E_NO_MEMORY, "'loader' could not take the values of the checkpoint: no room");
}

TEST_F(StateSource, WithoutACheckTakesAll) {
    api::Owned<tsr_state> other;
    ASSERT_OK(tsr_state_create(other.out()));
    tsr_state_source source = loader.source();
    source.check = nullptr;
    ASSERT_OK(tsr_state_add_source(other, "unchecked", &source));
    loader.epoch = 3;
    ASSERT_OK(tsr_saver_save(saver, 1, other));
    loader.epoch = 4;
    int64_t step = 0;
    ASSERT_OK(tsr_saver_resume(saver, other, &step));
    EXPECT_EQ(loader.epoch, 3);
}

TEST_F(StateSource, FailsASaveWithItsOwnNumber) {
    loader.on_collect = [](tsr_state*, char* message) { return says(message, "the queue is gone", 77); };
    EXPECT_FAILS(tsr_saver_save(saver, 1, state), TSR_E_USER,
                 "collecting the values of 'loader' failed: the queue is gone");
    int32_t domain = 0;
    EXPECT_EQ(tsr_error_native(tsr_error_last(), &domain), 77);
    EXPECT_EQ(domain, TSR_NATIVE_USER);
    EXPECT_FAILS(tsr_saver_save_async(saver, 1, state, nullptr), TSR_E_USER, "the queue is gone");
    loader.on_collect = [](tsr_state*, char*) { return -5; };
    EXPECT_FAILS(tsr_saver_save(saver, 1, state), TSR_E_USER, "it returned -5");
    loader.on_collect = [](tsr_state*, char* message) { return says(message, "\xff\xfe", 1); };
    EXPECT_FAILS(tsr_saver_save(saver, 1, state), TSR_E_INVALID_ARGUMENT, "its message is not UTF-8");
    loader.on_collect = [](tsr_state*, char* message) {
        std::memset(message, 'x', TSR_MESSAGE_BYTES);  // no final 0
        return 1;
    };
    EXPECT_FAILS(tsr_saver_save(saver, 1, state), TSR_E_INVALID_ARGUMENT, "xxxx");
    loader.on_collect = [](tsr_state*, char*) { return TSR_OK; };
    EXPECT_OK(tsr_saver_save(saver, 1, state));
}

// A callback that returns what a function of the library returned needs no words of its own.
TEST_F(StateSource, ThatPassesOnAnErrorOfTheLibrarySaysWhatThatSaid) {
    loader.note = R"("text")";
    ASSERT_OK(tsr_saver_save(saver, 1, state));
    EXPECT_FAILS(tsr_state_set_int64(state, "", 1), TSR_E_INVALID_ARGUMENT, "is empty");
    loader.on_check = [](const tsr_state*, char*) -> int32_t { return TSR_E_INVALID_ARGUMENT; };
    EXPECT_FAILS(resume(), TSR_E_INVALID_ARGUMENT, "it returned 1");  // an older error is not meant
    loader.on_check = [](const tsr_state* values, char*) {
        int64_t number = 0;
        return tsr_state_get_int64(values, "note", &number);
    };
    EXPECT_FAILS(resume(), TSR_E_INVALID_ARGUMENT, "refused the values of the checkpoint: value 'note'");
    loader.on_check = [](const tsr_state* values, char*) {
        int64_t number = 0;
        return tsr_state_get_int64(values, "nothing", &number);
    };
    EXPECT_FAILS(resume(), TSR_E_NOT_FOUND, "no value 'nothing'");
}

TEST_F(StateSource, GetsAValueOfAnotherTypeAsItWasSaved) {
    ASSERT_OK(tsr_saver_save(saver, 1, state));
    std::string seen;
    loader.on_collect = [](tsr_state* values, char*) { return tsr_state_set_value(values, "rate", R"("fast")"); };
    loader.on_check = [&](const tsr_state* values, char*) {
        size_t size = 0;
        seen.resize(64);
        EXPECT_OK(tsr_state_get_value(values, "rate", seen.data(), seen.size(), &size));
        seen.resize(size - 1);
        return TSR_OK;
    };
    ASSERT_OK(resume());
    EXPECT_EQ(seen, "0.0");
}

TEST_F(StateSource, KeepsWhatALoadAllowsToBeMissing) {
    loader.epoch = 3;
    ASSERT_OK(tsr_saver_save(saver, 1, state));
    loader.epoch = 4;
    loader.on_collect = [](tsr_state* values, char*) { return tsr_state_set_int64(values, "new", 5); };
    int64_t taken = 0;
    loader.on_check = [&](const tsr_state* values, char*) { return tsr_state_get_int64(values, "new", &taken); };
    EXPECT_FAILS(load(), TSR_E_MISMATCH, "'loader.new' is missing");
    tsr_load_options options;
    ASSERT_OK(tsr_load_options_init(&options, sizeof options));
    options.allow_missing = 1;
    ASSERT_OK(load(&options));
    EXPECT_EQ(loader.epoch, 3);
    EXPECT_EQ(taken, 5);

    ASSERT_OK(tsr_saver_save(saver, 2, state));
    loader.on_collect = [](tsr_state*, char*) { return TSR_OK; };
    loader.on_check = [](const tsr_state* values, char*) {
        int64_t nothing = 0;
        EXPECT_EQ(tsr_state_get_int64(values, "new", &nothing), TSR_E_NOT_FOUND);
        return TSR_OK;
    };
    EXPECT_FAILS(load(), TSR_E_MISMATCH, "'loader.new' is unexpected");
    options.allow_unexpected = 1;
    EXPECT_OK(load(&options));
}

TEST_F(StateSource, IsLeftAloneByALoadOfOtherNames) {
    loader.epoch = 3;
    loader.rate = 0.5;
    ASSERT_OK(tsr_saver_save(saver, 1, state));
    loader.epoch = 4;
    loader.rate = 0.75;
    loader.calls.clear();
    tsr_load_options options;
    ASSERT_OK(tsr_load_options_init(&options, sizeof options));
    const char* only = "w";
    options.only = &only;
    options.only_count = 1;
    ASSERT_OK(load(&options));
    EXPECT_EQ(loader.calls, (std::vector<std::string>{"collect"}));
    EXPECT_EQ(loader.epoch, 4);

    loader.calls.clear();
    only = "loader.rate";  // of which one name is loaded gets all of its own
    ASSERT_OK(load(&options));
    EXPECT_EQ(loader.calls, (std::vector<std::string>{"collect", "check", "apply"}));
    EXPECT_EQ(loader.epoch, 4);
    EXPECT_EQ(loader.rate, 0.5);
}

TEST_F(StateSource, MayNotUseTheStateOrSaverThatItServes) {
    std::vector<std::pair<std::string, tsr_status>> calls;
    const auto use_both = [&] {
        api::Array<float> array{{2}, 0.0F};
        const tsr_tensor tensor = array.tensor();
        Loader another;
        int64_t number = 0;
        double real = 0;
        size_t size = 0;
        int32_t stop = 0;
        calls.emplace_back("set_int64", tsr_state_set_int64(state, "x", 1));
        calls.emplace_back("set_double", tsr_state_set_double(state, "x", 1));
        calls.emplace_back("set_value", tsr_state_set_value(state, "x", "1"));
        calls.emplace_back("set_metric", tsr_state_set_metric(state, "x", 1));
        calls.emplace_back("get_int64", tsr_state_get_int64(state, "loader.epoch", &number));
        calls.emplace_back("get_double", tsr_state_get_double(state, "loader.rate", &real));
        calls.emplace_back("get_value", tsr_state_get_value(state, "loader.note", nullptr, 0, &size));
        calls.emplace_back("add_tensor", tsr_state_add_tensor(state, "x", &tensor));
        calls.emplace_back("add_source", another.add_to(state, "x"));
        EXPECT_EQ(another.destroyed, 1);
        calls.emplace_back("save", tsr_saver_save(saver, 2, state));
        calls.emplace_back("save_async", tsr_saver_save_async(saver, 2, state, nullptr));
        calls.emplace_back("resume", tsr_saver_resume(saver, state, &number));
        calls.emplace_back("wait", tsr_saver_wait(saver));
        calls.emplace_back("should_stop", tsr_saver_should_stop(saver, 1, 0, &stop));
    };
    const auto expect_refused = [&] {
        EXPECT_EQ(calls.size(), 14U);
        for (const auto& [name, status] : calls) EXPECT_EQ(status, TSR_E_INVALID_STATE) << name;
        calls.clear();
    };
    loader.on_collect = [&](tsr_state*, char*) { return use_both(), TSR_OK; };
    EXPECT_OK(tsr_saver_save(saver, 1, state));
    expect_refused();
    loader.on_collect = [](tsr_state*, char*) { return TSR_OK; };
    loader.on_check = [&](const tsr_state*, char*) { return use_both(), TSR_OK; };
    EXPECT_OK(resume());
    expect_refused();
    loader.on_check = [&](const tsr_state*, char*) {
        calls.emplace_back("load", load());
        return TSR_OK;
    };
    EXPECT_OK(load());
    ASSERT_EQ(calls.size(), 1U);
    EXPECT_EQ(calls[0].second, TSR_E_INVALID_STATE);
    // Afterwards all is as before.
    loader.on_check = [](const tsr_state*, char*) { return TSR_OK; };
    EXPECT_OK(tsr_state_set_int64(state, "x", 1));
    EXPECT_OK(tsr_saver_save(saver, 3, state));
}

TEST_F(StateSource, MayDestroyTheStateAndSaverThatItServes) {
    loader.on_collect = [&](tsr_state* values, char*) {
        state.reset();
        saver.reset();
        EXPECT_EQ(loader.destroyed, 0);
        tsr_state_destroy(values);  // not its own to destroy, and yet no crash
        return TSR_OK;
    };
    EXPECT_OK(tsr_saver_save(saver, 1, state));
    EXPECT_EQ(loader.destroyed, 1);
    api::Owned<tsr_checkpoint> checkpoint;
    EXPECT_OK(tsr_checkpoint_open(directory.path().c_str(), checkpoint.out()));
}

TEST_F(StateSource, MayDestroyTheStateThatIsAskedForAValue) {
    loader.on_collect = [&](tsr_state*, char*) {
        state.reset();
        return TSR_OK;
    };
    int64_t epoch = -1;
    EXPECT_OK(tsr_state_get_int64(state, "loader.epoch", &epoch));
    EXPECT_EQ(epoch, 0);
    EXPECT_EQ(loader.destroyed, 1);
}

TEST_F(StateSource, DataIsDestroyedOnceWithTheState) {
    EXPECT_EQ(loader.destroyed, 0);
    ASSERT_OK(tsr_saver_save_async(saver, 1, state, nullptr));
    state.reset();
    EXPECT_EQ(loader.destroyed, 1);
    EXPECT_OK(tsr_saver_wait(saver));
    EXPECT_EQ(loader.destroyed, 1);
}

TEST_F(StateSource, ThatCannotBeAddedIsDestroyedOnce) {
    const auto refused = [&](tsr_state* to, const char* prefix, const char* what,
                             tsr_status status = TSR_E_INVALID_ARGUMENT) {
        Loader another;
        EXPECT_FAILS(another.add_to(to, prefix), status, what);
        EXPECT_EQ(another.destroyed, 1) << what;
        EXPECT_TRUE(another.calls.empty()) << what;
    };
    refused(nullptr, "x", "state is NULL");
    refused(state, nullptr, "prefix is NULL");
    refused(state, "", "prefix is empty");
    refused(state, "\xff", "not UTF-8");
    refused(state, "loader", "already has values under the prefix 'loader'");
    refused(state, "loader.inner", "already has values under the prefix 'loader'");
    ASSERT_OK(tsr_state_set_int64(state, "data.x", 1));
    refused(state, "data", "already has the value 'data.x'");
    api::Owned<tsr_state> gone;
    ASSERT_OK(tsr_state_create(gone.out()));
    tsr_state* dangling = gone;
    gone.reset();
    refused(dangling, "x", "was destroyed", TSR_E_INVALID_STATE);
    for (const bool collects : {false, true}) {
        Loader another;
        tsr_state_source source = another.source();
        if (collects) {
            source.apply = nullptr;
        } else {
            source.collect = nullptr;
        }
        EXPECT_FAILS(tsr_state_add_source(state, "x", &source), TSR_E_INVALID_ARGUMENT,
                     collects ? "source.apply is NULL" : "source.collect is NULL");
        EXPECT_EQ(another.destroyed, 1);
    }
    EXPECT_EQ(loader.destroyed, 0);
    EXPECT_OK(tsr_saver_save(saver, 1, state));
}

TEST_F(StateSource, WhoseStructCannotBeReadStaysTheCallers) {
    Loader another;
    tsr_state_source source = another.source();
    source.struct_size = 0;
    EXPECT_FAILS(tsr_state_add_source(state, "x", &source), TSR_E_INVALID_ARGUMENT, "struct_size is 0");
    EXPECT_FAILS(tsr_state_add_source(state, "x", nullptr), TSR_E_INVALID_ARGUMENT, "source is NULL");
    struct Newer {
        tsr_state_source known;
        void* more;
    } newer{another.source(), nullptr};
    newer.known.struct_size = sizeof newer;
    newer.more = this;
    EXPECT_FAILS(tsr_state_add_source(state, "x", &newer.known), TSR_E_UNSUPPORTED, "does not know");
    EXPECT_EQ(another.destroyed, 0);
    newer.more = nullptr;
    EXPECT_OK(tsr_state_add_source(state, "x", &newer.known));
    state.reset();
    EXPECT_EQ(another.destroyed, 1);
}

TEST_F(StateSource, OwnsTheValuesUnderItsPrefix) {
    EXPECT_FAILS(tsr_state_set_int64(state, "loader.other", 1), TSR_E_INVALID_ARGUMENT, "belongs to the object added");
    EXPECT_OK(tsr_state_set_int64(state, "loaders", 1));
    api::Array<float> queue{{3}, 1.0F};
    const tsr_tensor tensor = queue.tensor();
    EXPECT_OK(tsr_state_add_tensor(state, "loader.queue", &tensor));  // its tensors stand beside its values
    EXPECT_OK(tsr_saver_save(saver, 1, state));
    loader.on_collect = [](tsr_state* values, char*) { return tsr_state_set_int64(values, "queue", 1); };
    EXPECT_FAILS(tsr_saver_save(saver, 2, state), TSR_E_INVALID_ARGUMENT,
                 "'loader' returned the value 'loader.queue', which is a tensor of the state");
}

TEST_F(StateSource, GivesValuesAlone) {
    api::Array<float> array{{2}, 0.0F};
    Loader another;
    loader.on_collect = [&](tsr_state* values, char*) {
        const tsr_tensor tensor = array.tensor();
        return tsr_state_add_tensor(values, "x", &tensor);
    };
    EXPECT_FAILS(tsr_saver_save(saver, 1, state), TSR_E_INVALID_ARGUMENT, "added more than values");
    loader.on_collect = [](tsr_state* values, char*) { return tsr_state_set_metric(values, "loss", 1); };
    EXPECT_FAILS(tsr_saver_save(saver, 1, state), TSR_E_INVALID_ARGUMENT, "added more than values");
    loader.on_collect = [&](tsr_state* values, char*) { return another.add_to(values, "x"); };
    EXPECT_FAILS(tsr_saver_save(saver, 1, state), TSR_E_INVALID_ARGUMENT, "added more than values");
    EXPECT_EQ(another.destroyed, 1);
    const std::string longest(1024, 'n');
    loader.on_collect = [&](tsr_state* values, char*) { return tsr_state_set_int64(values, longest.c_str(), 1); };
    EXPECT_FAILS(tsr_saver_save(saver, 1, state), TSR_E_INVALID_ARGUMENT, "has 1031 bytes");
}

// A name that is short enough may be too long under the prefix.
TEST_F(StateSource, GivesNamesThatAreTooLongUnderItsPrefix) {
    const std::string name(1020, 'n');
    loader.on_collect = [&](tsr_state* values, char*) { return tsr_state_set_int64(values, name.c_str(), 1); };
    EXPECT_FAILS(tsr_saver_save(saver, 1, state), TSR_E_INVALID_ARGUMENT, "a value's name has 1027 bytes");
    loader.on_collect = [](tsr_state*, char*) { return TSR_OK; };
    EXPECT_OK(tsr_saver_save(saver, 2, state));
}

TEST_F(StateSource, IsLentItsValuesForTheCallAlone) {
    tsr_state* kept = nullptr;
    loader.on_collect = [&](tsr_state* values, char*) {
        kept = values;
        return TSR_OK;
    };
    ASSERT_OK(tsr_saver_save(saver, 1, state));
    EXPECT_FAILS(tsr_state_set_int64(kept, "late", 1), TSR_E_INVALID_STATE, "destroyed");
}

// Two ranks, each with a tensor and a loader; `fail` says what rank 1's loader does otherwise.
void run_two(const std::function<void(tsr_comm* comm, int32_t rank, const std::string& root, api::Array<float>& weights,
                                      Loader& loader, tsr_state* state, tsr_saver* saver)>& body) {
    const api::TemporaryDirectory directory;
    api::run_ranks(2, [&](tsr_comm* comm, int32_t rank) {
        api::Array<float> weights{{4}, 1.0F};
        Loader loader;
        api::Owned<tsr_state> state = api::state_of("w", weights);
        ASSERT_OK(loader.add_to(state));
        api::Owned<tsr_saver> saver;
        ASSERT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
        body(comm, rank, directory.path(), weights, loader, state, saver);
    });
}

TEST(StateSources, ThatFailToCollectOnOneRankFailTheSaveOnAll) {
    run_two([](tsr_comm*, int32_t rank, const std::string& root, api::Array<float>&, Loader& loader, tsr_state* state,
               tsr_saver* saver) {
        loader.on_collect = [&](tsr_state*, char* message) {
            return rank == 1 ? says(message, "the queue is gone", 77) : TSR_OK;
        };
        for (const bool background : {false, true}) {
            const tsr_status status =
                background ? tsr_saver_save_async(saver, 1, state, nullptr) : tsr_saver_save(saver, 1, state);
            EXPECT_EQ(status, TSR_E_USER);
            EXPECT_THAT(api::message(),
                        HasSubstr("rank 1: collecting the values of 'loader' failed: the queue is gone"));
            EXPECT_EQ(tsr_error_native(tsr_error_last(), nullptr), 77);
            EXPECT_EQ(tsr_error_rank(tsr_error_last()), 1);
        }
        api::Owned<tsr_checkpoint> nothing;
        EXPECT_EQ(tsr_checkpoint_open(root.c_str(), nothing.out()), TSR_E_NOT_FOUND);
        loader.on_collect = [](tsr_state*, char*) { return TSR_OK; };
        EXPECT_OK(tsr_saver_save(saver, 1, state));
    });
}

TEST(StateSources, ThatRefuseOnOneRankLeaveAllRanksAsTheyWere) {
    run_two([](tsr_comm* comm, int32_t rank, const std::string& root, api::Array<float>& weights, Loader& loader,
               tsr_state* state, tsr_saver* saver) {
        ASSERT_OK(tsr_saver_save(saver, 1, state));
        weights.values.assign(4, 7.0F);
        loader.epoch = 9;
        loader.on_check = [&](const tsr_state*, char* message) {
            return rank == 1 ? says(message, "too early", TSR_E_MISMATCH) : TSR_OK;
        };
        const auto expect_untouched = [&](tsr_status status) {
            EXPECT_EQ(status, TSR_E_MISMATCH);
            EXPECT_THAT(api::message(), HasSubstr("rank 1: 'loader' refused the values of the checkpoint: too early"));
            EXPECT_EQ(weights.values, std::vector(4, 7.0F));
            EXPECT_EQ(loader.epoch, 9);
        };
        int64_t step = 0;
        expect_untouched(tsr_saver_resume(saver, state, &step));
        api::Owned<tsr_checkpoint> checkpoint;
        ASSERT_OK(tsr_checkpoint_open(root.c_str(), checkpoint.out()));
        tsr_load_options options;
        ASSERT_OK(tsr_load_options_init(&options, sizeof options));
        options.comm = comm;
        expect_untouched(tsr_checkpoint_load(checkpoint, state, &options));
        loader.on_check = [](const tsr_state*, char*) { return TSR_OK; };
        ASSERT_OK(tsr_checkpoint_load(checkpoint, state, &options));
        EXPECT_EQ(weights.values, std::vector(4, 1.0F));
        EXPECT_EQ(loader.epoch, 0);
    });
}

TEST(StateSources, ThatFailToApplyOnOneRankFailTheLoadOnAll) {
    run_two([](tsr_comm*, int32_t rank, const std::string&, api::Array<float>&, Loader& loader, tsr_state* state,
               tsr_saver* saver) {
        ASSERT_OK(tsr_saver_save(saver, 1, state));
        loader.on_apply = [&](char* message) { return rank == 1 ? says(message, "no room", TSR_E_NO_MEMORY) : TSR_OK; };
        int64_t step = 0;
        EXPECT_FAILS(tsr_saver_resume(saver, state, &step), TSR_E_NO_MEMORY,
                     "rank 1: 'loader' could not take the values of the checkpoint: no room");
    });
}

TEST(StateSources, WithOtherNamesOnAnotherRankAreAMismatch) {
    run_two([](tsr_comm*, int32_t rank, const std::string&, api::Array<float>&, Loader& loader, tsr_state* state,
               tsr_saver* saver) {
        loader.on_collect = [&](tsr_state* values, char*) {
            return tsr_state_set_int64(values, rank == 0 ? "here" : "there", 1);
        };
        EXPECT_EQ(tsr_saver_save(saver, 1, state), TSR_E_MISMATCH);
        EXPECT_THAT(api::message(), HasSubstr("rank 1: state differs from rank 0's"));
        EXPECT_THAT(api::message(), HasSubstr("'loader.here'"));
    });
}

TEST(StateSources, OfEachRankHaveValuesOfTheirOwnUnderItsPrefix) {
    run_two([](tsr_comm*, int32_t rank, const std::string&, api::Array<float>&, Loader& loader, tsr_state* state,
               tsr_saver* saver) {
        Loader own;
        ASSERT_OK(own.add_to(state, ("rank/" + std::to_string(rank) + "/own").c_str()));
        own.epoch = 10 + rank;
        loader.epoch = 20 + rank;
        ASSERT_OK(tsr_saver_save(saver, 1, state));
        own.epoch = loader.epoch = 0;
        int64_t step = 0;
        ASSERT_OK(tsr_saver_resume(saver, state, &step));
        EXPECT_EQ(own.epoch, 10 + rank);
        EXPECT_EQ(loader.epoch, 20);  // rank 0's
        tsr_state_destroy(state);     // before `own` goes; the caller's destroy is a second one, which does nothing
        EXPECT_EQ(own.destroyed, 1);
    });
}

}  // namespace
