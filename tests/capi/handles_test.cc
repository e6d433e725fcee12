// Every function against arguments that are no arguments: NULL and 0 for everything, handles of another type, handles that
// were destroyed. None may crash; each says what is wrong.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <map>
#include <memory>
#include <set>

#include "all_functions.hpp"
#include "api.hpp"
#include "patience.hpp"

namespace {

// Functions that take NULL and 0 for an answer: what they do then is said in the headers.
const std::set<std::string> take_nothing{"tsr_log_set_callback", "tsr_interrupt_set"};

struct Called {
    std::string name;
    tsr_status status;
    std::string message;
};

template <class R, class... A>
void call_with_nothing(const char* name, R (*function)(A...), std::vector<Called>& calls) {
    if constexpr (std::is_same_v<R, tsr_status>) {
        // An int32_t is a status only for the functions that promise one.
        const tsr_status status = function(A{}...);
        calls.push_back({name, status, api::message()});
    } else {
        function(A{}...);
        calls.push_back({name, TSR_OK, ""});
    }
}

const std::set<std::string> answer_with_numbers{"tsr_error_code",   "tsr_error_rank",      "tsr_error_peer",
                                                "tsr_error_native", "tsr_error_retriable", "tsr_preempt_requested"};

TEST(Nothing, IsRefusedByEveryFunctionThatNeedsSomething) {
    std::vector<Called> calls;
#define F(name) call_with_nothing(#name, name, calls);
    ALL_FUNCTIONS(F)
#undef F
    for (const Called& call : calls) {
        if (answer_with_numbers.contains(call.name)) continue;
        if (call.status == TSR_OK) {
            EXPECT_TRUE(call.message.empty() || take_nothing.contains(call.name)) << call.name << " took nothing";
            continue;
        }
        EXPECT_EQ(call.status, TSR_E_INVALID_ARGUMENT) << call.name << ": " << call.message;
        if (call.name == "tsr_log_set_level") continue;  // has no pointer
        EXPECT_THAT(call.message, ::testing::HasSubstr("NULL")) << call.name;
    }
}

// Each type of handle, and its member of Handles.
#define ALL_HANDLES(X)            \
    X(tsr_store_server, server)   \
    X(tsr_store, store)           \
    X(tsr_comm, comm)             \
    X(tsr_work, work)             \
    X(tsr_buffer, buffer)         \
    X(tsr_mesh, mesh)             \
    X(tsr_plan, plan)             \
    X(tsr_turn, turn)             \
    X(tsr_layout, layout)         \
    X(tsr_ddp, ddp)               \
    X(tsr_fsdp, fsdp)             \
    X(tsr_tp, tp)                 \
    X(tsr_pipeline, pipeline)     \
    X(tsr_engine, engine)         \
    X(tsr_optimizer, optimizer)   \
    X(tsr_grad_scaler, scaler)    \
    X(tsr_loss_scale, loss_scale) \
    X(tsr_lr_schedule, schedule)  \
    X(tsr_sampler, sampler)       \
    X(tsr_metric, metric)         \
    X(tsr_state, state)           \
    X(tsr_saver, saver)           \
    X(tsr_checkpoint, checkpoint)

// One live handle of each type, in a job of one rank.
struct Handles {
    api::TemporaryDirectory directory;
    std::string token = std::string(64, '5');
    api::Array<float> value{{4}, 1.0F};
    api::Array<float> grad{{4}, 1.0F};
    api::Owned<tsr_store_server> server;
    api::Owned<tsr_store> store;
    api::Owned<tsr_comm> comm;
    api::Owned<tsr_work> work;
    api::Owned<tsr_buffer> buffer;
    api::Owned<tsr_mesh> mesh;
    api::Owned<tsr_plan> plan;
    api::Owned<tsr_turn> turn;
    api::Owned<tsr_layout> layout;
    api::Owned<tsr_ddp> ddp;
    api::Owned<tsr_fsdp> fsdp;
    api::Owned<tsr_tp> tp;
    api::Owned<tsr_pipeline> pipeline;
    api::Owned<tsr_engine> engine;
    api::Owned<tsr_optimizer> optimizer;
    api::Owned<tsr_grad_scaler> scaler;
    api::Owned<tsr_loss_scale> loss_scale;
    api::Owned<tsr_lr_schedule> schedule;
    api::Owned<tsr_sampler> sampler;
    api::Owned<tsr_metric> metric;
    api::Owned<tsr_state> state;
    api::Owned<tsr_saver> saver;
    api::Owned<tsr_checkpoint> checkpoint;

    Handles() {
        tsr_store_options options;
        EXPECT_OK(tsr_store_options_init(&options, sizeof options));
        options.token = token.c_str();
        options.job_id = "handles";
        EXPECT_OK(tsr_store_serve("127.0.0.1", 0, &options, server.out()));
        uint16_t port = 0;
        EXPECT_OK(tsr_store_server_port(server, &port));
        EXPECT_OK(tsr_store_open(("tcp://127.0.0.1:" + std::to_string(port)).c_str(), &options, store.out()));
        EXPECT_OK(tsr_comm_from_env(nullptr, comm.out()));
        const tsr_tensor tensor = value.tensor();
        EXPECT_OK(tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, nullptr, work.out()));
        EXPECT_OK(tsr_work_wait(work, tsr::testing::patience_ms(10000)));
        EXPECT_OK(tsr_buffer_create(comm, 64, buffer.out()));
        const char* name = "dp";
        const int32_t one = 1;
        EXPECT_OK(tsr_mesh_create(comm, &name, &one, 1, mesh.out()));
        EXPECT_OK(tsr_plan_create(comm, TSR_COLLECTIVE_ALL_REDUCE, nullptr, 0, &tensor, 1, TSR_REDUCE_SUM, -1, nullptr,
                                  plan.out()));
        const int64_t four = 4;
        const tsr_placement whole{TSR_PLACE_REPLICATE, 0};
        EXPECT_OK(tsr_layout_create(&four, 1, &one, &whole, 1, layout.out()));
        const tsr_param param{"w", tensor};
        EXPECT_OK(tsr_ddp_create(comm, &param, 1, nullptr, ddp.out()));
        const tsr_fsdp_unit unit{"u", &param, 1, nullptr, 1, {}};
        EXPECT_OK(tsr_fsdp_create(comm, &unit, 1, nullptr, fsdp.out()));
        EXPECT_OK(tsr_tp_create(mesh, &param, 1, nullptr, 0, nullptr, tp.out()));
        tsr_pipeline_options pipeline_options;
        EXPECT_OK(tsr_pipeline_options_init(&pipeline_options, sizeof pipeline_options));
        pipeline_options.microbatches = 1;
        const int32_t stage = 0;
        tsr_pipeline_callbacks callbacks{};
        callbacks.struct_size = sizeof callbacks;
        callbacks.forward = callbacks.backward = [](const tsr_stage_call*, char*, void*) -> int32_t { return 0; };
        EXPECT_OK(tsr_pipeline_create(comm, &stage, 1, &callbacks, &pipeline_options, pipeline.out()));
        const tsr_engine_unit engine_unit{"u", &param, 1, 0};
        EXPECT_OK(tsr_engine_create(comm, &engine_unit, 1, R"({"train_batch_size": 1, "optimizer": {"type": "SGD"}})",
                                    nullptr, engine.out()));
        const tsr_tensor gradient = grad.tensor();
        EXPECT_OK(tsr_sgd_create(&param, &gradient, 1, nullptr, optimizer.out()));
        EXPECT_OK(tsr_grad_scaler_create(nullptr, scaler.out()));
        EXPECT_OK(tsr_loss_scale_create(nullptr, loss_scale.out()));
        EXPECT_OK(tsr_lr_exponential(0.5, schedule.out()));
        EXPECT_OK(tsr_sampler_create(comm, 10, nullptr, sampler.out()));
        EXPECT_OK(tsr_metric_create(TSR_METRIC_AUROC, nullptr, metric.out()));
        EXPECT_OK(tsr_state_create(state.out()));
        EXPECT_OK(tsr_state_add_tensor(state, "w", &tensor));
        EXPECT_OK(tsr_saver_create(comm, directory.path().c_str(), nullptr, saver.out()));
        EXPECT_OK(tsr_saver_save(saver, 1, state));
        EXPECT_OK(tsr_checkpoint_open(directory.path().c_str(), checkpoint.out()));
        EXPECT_OK(tsr_turn_create(comm, 0, 1000, turn.out()));  // last: it has the communicator to itself
    }

    // By type: the handle, so that a function's first parameter finds its own.
    template <class T>
    T* get() {
#define IF(type, member) \
    if constexpr (std::is_same_v<T, type>) return member;
        ALL_HANDLES(IF)
#undef IF
        return nullptr;
    }
};

#define OR(type, member) || std::is_same_v<T, type>
template <class T>
constexpr bool is_handle = false ALL_HANDLES(OR);
#undef OR

// Calls every function whose first parameter is a handle, with the handle that `choose` gives for its type, and something
// that can be written to for each pointer after it.
alignas(64) std::array<std::byte, 4096> scratch;

template <class T>
T filler() {
    if constexpr (std::is_pointer_v<T> && std::is_object_v<std::remove_pointer_t<T>>) {
        if constexpr (std::is_same_v<T, const char*>) return "x";
        if constexpr (requires { sizeof(std::remove_pointer_t<T>); }) {
            if constexpr (!is_handle<std::remove_const_t<std::remove_pointer_t<T>>>) {
                scratch.fill(std::byte{0});
                return reinterpret_cast<T>(scratch.data());
            }
        }
    }
    return T{};
}

template <class Choose, class R, class First, class... Rest>
void call_with_handle(const char* name, R (*function)(First*, Rest...), std::vector<Called>& calls,
                      const Choose& choose) {
    using Handle = std::remove_const_t<First>;
    if constexpr (is_handle<Handle> && std::is_same_v<R, tsr_status>) {
        const tsr_status status = function(choose.template operator()<Handle>(), filler<Rest>()...);
        calls.push_back({name, status, api::message()});
    }
}
template <class Choose, class R, class... A>
void call_with_handle(const char*, R (*)(A...), std::vector<Called>&, const Choose&) {}

TEST(WrongHandle, IsRefusedByEveryFunction) {
    Handles handles;
    std::vector<Called> calls;
    const auto another = [&]<class T>() {
        return std::is_same_v<T, tsr_sampler> ? reinterpret_cast<T*>(handles.get<tsr_state>())
                                              : reinterpret_cast<T*>(handles.get<tsr_sampler>());
    };
#define F(name) call_with_handle(#name, name, calls, another);
    ALL_FUNCTIONS(F)
#undef F
    EXPECT_GT(calls.size(), 60U);
    for (const Called& call : calls) {
        EXPECT_EQ(call.status, TSR_E_INVALID_ARGUMENT) << call.name << ": " << call.message;
        EXPECT_THAT(call.message, ::testing::HasSubstr("is not a handle of the expected type")) << call.name;
    }
    int64_t epoch = 0;
    EXPECT_OK(tsr_sampler_position(handles.sampler, &epoch, nullptr)) << "the abused handle is unharmed";
}

TEST(WrongHandle, IsLeftAloneByDestroy) {
    Handles handles;
    tsr_optimizer_destroy(reinterpret_cast<tsr_optimizer*>(handles.get<tsr_sampler>()));
    tsr_comm_destroy(reinterpret_cast<tsr_comm*>(handles.get<tsr_sampler>()));
    int64_t epoch = 0;
    EXPECT_OK(tsr_sampler_position(handles.sampler, &epoch, nullptr));
}

TEST(DestroyedHandle, IsRefusedByEveryFunction) {
    std::vector<Called> calls;
    std::map<std::string, void*> dead;
    {
        Handles handles;
#define KEEP(type, member) dead[#type] = static_cast<type*>(handles.member);
        ALL_HANDLES(KEEP)
#undef KEEP
    }
    const auto destroyed = [&]<class T>() -> T* {
#define IF(type, member) \
    if constexpr (std::is_same_v<T, type>) return static_cast<T*>(dead.at(#type));
        ALL_HANDLES(IF)
#undef IF
        return nullptr;
    };
#define F(name) call_with_handle(#name, name, calls, destroyed);
    ALL_FUNCTIONS(F)
#undef F
    for (const Called& call : calls) {
        EXPECT_EQ(call.status, TSR_E_INVALID_STATE) << call.name << ": " << call.message;
        EXPECT_THAT(call.message, ::testing::HasSubstr("was destroyed before this call")) << call.name;
    }
    tsr_sampler_destroy(static_cast<tsr_sampler*>(dead.at("tsr_sampler")));  // twice
    tsr_comm_destroy(static_cast<tsr_comm*>(dead.at("tsr_comm")));
}

TEST(DestroyedHandle, IsRefusedAsALaterArgument) {
    Handles handles;
    auto* sampler = handles.get<tsr_sampler>();
    handles.sampler.reset();
    EXPECT_FAILS(tsr_state_add_sampler(handles.state, "data", sampler), TSR_E_INVALID_STATE, "destroyed");
    EXPECT_FAILS(tsr_state_add_sampler(handles.state, "data", nullptr), TSR_E_INVALID_ARGUMENT, "NULL");
    EXPECT_FAILS(tsr_state_add_ddp(handles.state, "model", reinterpret_cast<tsr_ddp*>(handles.get<tsr_state>())),
                 TSR_E_INVALID_ARGUMENT, "not a handle of the expected type");
    EXPECT_FAILS(tsr_checkpoint_load(handles.checkpoint, nullptr, nullptr), TSR_E_INVALID_ARGUMENT, "NULL");
    auto* state = handles.get<tsr_state>();
    handles.state.reset();
    EXPECT_FAILS(tsr_checkpoint_load(handles.checkpoint, state, nullptr), TSR_E_INVALID_STATE, "destroyed");
    EXPECT_FAILS(tsr_saver_save(handles.saver, 2, state), TSR_E_INVALID_STATE, "destroyed");
}

// --- in a forked child

// Runs `body` in a child; what it returns, or how the child ended. A child that hangs is ended after a while.
std::string in_child(const std::function<std::string()>& body) {
    int ends[2];
    if (::pipe(ends) != 0) return "no pipe";
    const pid_t child = ::fork();
    if (child == 0) {
        ::alarm(static_cast<unsigned>(tsr::testing::patience_ms(20000)) / 1000);
        const std::string told = body();
        (void)!::write(ends[1], told.data(), told.size());
        ::_exit(0);
    }
    ::close(ends[1]);
    std::string told;
    std::array<char, 4096> part{};
    for (ssize_t n = 0; (n = ::read(ends[0], part.data(), part.size())) > 0;) {
        told.append(part.data(), static_cast<size_t>(n));
    }
    ::close(ends[0]);
    int status = -1;
    ::waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) told += WTERMSIG(status) == SIGALRM ? "the child hangs" : "the child died of a signal";
    return told;
}

// What changes something or waits for somebody: a handle that is not const, or a work or a plan, which others finish.
template <class First>
constexpr bool is_use =
    !std::is_const_v<First> || std::is_same_v<First, const tsr_work> || std::is_same_v<First, const tsr_plan>;

template <class R, class First, class... Rest>
void use_inherited(const char* name, R (*function)(First*, Rest...), std::vector<Called>& calls, Handles& handles) {
    using Handle = std::remove_const_t<First>;
    // A store has connections of its own in a child; what a communicator needs besides its handle is told below.
    if constexpr (is_handle<Handle> && is_use<First> && std::is_same_v<R, tsr_status> &&
                  !std::is_same_v<Handle, tsr_store> && !std::is_same_v<Handle, tsr_comm>) {
        const tsr_status status = function(handles.get<Handle>(), filler<Rest>()...);
        calls.push_back({name, status, api::message()});
    }
}
template <class R, class... A>
void use_inherited(const char*, R (*)(A...), std::vector<Called>&, Handles&) {}

std::string refusals_missing(const std::vector<Called>& calls) {
    std::string missing;
    for (const Called& call : calls) {
        if (call.status == TSR_E_INVALID_STATE && call.message.find("forked process") != std::string::npos) continue;
        missing += call.name + ": " + tsr_status_name(call.status) + " " + call.message + "\n";
    }
    return missing;
}

TEST(ForkedChild, IsRefusedByEveryFunctionThatUsesAHandle) {
    Handles handles;
    const auto try_all = [&] {
        std::vector<Called> calls;
#define F(name) use_inherited(#name, name, calls, handles);
        ALL_FUNCTIONS(F)
#undef F
        return calls.size() > 60 ? refusals_missing(calls) : "only " + std::to_string(calls.size());
    };
    EXPECT_EQ(in_child(try_all), "");
    EXPECT_OK(tsr_saver_save(handles.saver, 2, handles.state)) << "the parent's are unharmed";
}

TEST(ForkedChild, IsRefusedByACommunicator) {
    Handles handles;
    EXPECT_EQ(in_child([&] {
                  tsr_comm* comm = handles.comm;
                  const tsr_tensor tensor = handles.value.tensor();
                  std::vector<Called> calls;
                  const auto add = [&](const char* name, tsr_status status) {
                      calls.push_back({name, status, api::message()});
                  };
                  api::Owned<tsr_work> work;
                  api::Owned<tsr_comm> group;
                  api::Owned<tsr_buffer> buffer;
                  api::Owned<tsr_plan> plan;
                  api::Owned<tsr_error> error;
                  add("barrier", tsr_comm_barrier(comm, nullptr));
                  add("barrier in the background", tsr_comm_barrier(comm, work.out()));
                  add("all_reduce", tsr_comm_all_reduce(comm, &tensor, 1, TSR_REDUCE_SUM, nullptr, nullptr));
                  add("split", tsr_comm_split(comm, 0, 0, nullptr, group.out()));
                  add("shrink", tsr_comm_shrink(comm, nullptr, group.out()));
                  add("buffer", tsr_buffer_create(comm, 10, buffer.out()));
                  add("plan", tsr_plan_create(comm, TSR_COLLECTIVE_BARRIER, nullptr, 0, nullptr, 0, 0, -1, nullptr,
                                              plan.out()));
                  add("error", tsr_comm_error(comm, error.out()));
                  add("write_trace", tsr_comm_write_trace(comm, (handles.directory.path() / "trace").c_str()));
                  add("abort", tsr_comm_abort(comm, "in a child"));
                  add("finalize", tsr_comm_finalize(comm));
                  return refusals_missing(calls);
              }),
              "");
    EXPECT_OK(tsr_turn_end(handles.turn, nullptr));
    EXPECT_OK(tsr_comm_barrier(handles.comm, nullptr));
}

TEST(ForkedChild, MayReadAndDestroyWhatItInherits) {
    auto handles = std::make_unique<Handles>();
    EXPECT_EQ(in_child([&]() -> std::string {
                  int32_t rank = -1;
                  int64_t position = -1;
                  int64_t step = -1;
                  if (tsr_comm_rank(handles->comm, &rank) != TSR_OK || rank != 0) return api::message();
                  if (tsr_sampler_position(handles->sampler, nullptr, &position) != TSR_OK) return api::message();
                  if (tsr_checkpoint_step(handles->checkpoint, &step) != TSR_OK || step != 1) return api::message();
                  api::Array<float> read{{4}, 0.0F};
                  const tsr_tensor tensor = read.tensor();
                  if (tsr_checkpoint_read(handles->checkpoint, "w", &tensor) != TSR_OK) return api::message();
                  if (tsr_store_set(handles->store, "from the child", "x", 1) != TSR_OK) return api::message();
                  api::Owned<tsr_comm> own;
                  if (tsr_comm_create(handles->store, 0, 1, nullptr, own.out()) != TSR_OK) return api::message();
                  if (tsr_comm_barrier(own, nullptr) != TSR_OK) return api::message();
                  // Not the directory, which is the parent's.
                  handles->checkpoint.reset();
                  handles->saver.reset();
                  handles->state.reset();
                  handles->sampler.reset();
                  handles->scaler.reset();
                  handles->schedule.reset();
                  handles->loss_scale.reset();
                  handles->optimizer.reset();
                  handles->engine.reset();
                  handles->fsdp.reset();
                  handles->tp.reset();
                  handles->ddp.reset();
                  handles->layout.reset();
                  handles->plan.reset();
                  handles->turn.reset();
                  handles->mesh.reset();
                  handles->buffer.reset();
                  handles->work.reset();
                  handles->comm.reset();
                  handles->store.reset();
                  handles->server.reset();
                  return "";
              }),
              "");
    EXPECT_OK(tsr_store_wait(handles->store, "from the child", 0)) << "the server lives";
    EXPECT_OK(tsr_turn_end(handles->turn, nullptr));
    EXPECT_OK(tsr_comm_barrier(handles->comm, nullptr));
    EXPECT_OK(tsr_saver_save(handles->saver, 2, handles->state)) << "the root is still the parent's";
    EXPECT_OK(tsr_ddp_ready_all(handles->ddp));
    EXPECT_OK(tsr_ddp_wait(handles->ddp));
}

// There nothing would ever end it.
TEST(ForkedChild, DoesNotWaitForASaveOfItsParent) {
    Handles handles;
    api::Array<float> large{{1 << 20}, 1.0F};
    const auto state = api::state_of("large", large);
    api::Owned<tsr_work> work;
    ASSERT_OK(tsr_saver_save_async(handles.saver, 2, state, work.out()));
    EXPECT_EQ(in_child([&] {
                  std::vector<Called> calls;
                  int32_t done = 0;
                  calls.push_back({"wait", tsr_saver_wait(handles.saver), api::message()});
                  calls.push_back({"save", tsr_saver_save(handles.saver, 3, state), api::message()});
                  calls.push_back({"work_wait", tsr_work_wait(work, -1), api::message()});
                  calls.push_back({"work_order", tsr_work_order(work, nullptr, -1), api::message()});
                  calls.push_back({"work_test", tsr_work_test(work, &done), api::message()});
                  return refusals_missing(calls);
              }),
              "");
    EXPECT_OK(tsr_work_wait(work, tsr::testing::patience_ms(20000)));
    EXPECT_OK(tsr_saver_save(handles.saver, 3, state));
}

}  // namespace
