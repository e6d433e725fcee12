// A rank of a job that loses a rank: `recovery ROOT TIMES`. It trains a model of 4 Mi parameters with AdamW and saves to
// ROOT every tenth step. In step 25 the first process of rank 1 writes the time to TIMES/killed and kills itself; each rank
// writes the time to TIMES/back-RANK when it has done the first step after that. Under `tessera run --on-loss replace` the
// others stay in their processes, else all ranks start again.
#include <signal.h>
#include <tessera/tessera.h>
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

void check(tsr_status status, const char* what) {
    if (status == TSR_OK) return;
    std::fprintf(stderr, "%s: %s\n", what, tsr_error_message(tsr_error_last()));
    std::exit(1);
}

void write_time(const std::string& path) {
    timespec now{};
    ::clock_gettime(CLOCK_MONOTONIC, &now);  // one clock for all processes of the host
    std::FILE* file = std::fopen(path.c_str(), "w");
    if (file == nullptr) std::exit(2);
    std::fprintf(file, "%.6f\n", static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec));
    std::fclose(file);
}

bool exists(const std::string& path) {
    std::FILE* file = std::fopen(path.c_str(), "r");
    if (file != nullptr) std::fclose(file);
    return file != nullptr;
}

tsr_status train(tsr_comm* comm, const std::string& root, const std::string& times) {
    constexpr int64_t size = 4 << 20;
    int32_t rank = 0;
    check(tsr_comm_rank(comm, &rank), "rank");
    std::vector<float> weights(size);
    const auto tensor = tsr_f32_1d(weights.data(), size);
    const tsr_param param = {"weight", tensor};
    tsr_ddp* ddp = nullptr;
    tsr_optimizer* optimizer = nullptr;
    tsr_state* state = nullptr;
    tsr_saver* saver = nullptr;
    check(tsr_ddp_create(comm, &param, 1, nullptr, &ddp), "model");
    check(tsr_ddp_adamw(ddp, nullptr, &optimizer), "optimizer");
    check(tsr_state_create(&state), "state");
    check(tsr_state_add_ddp(state, "model", ddp), "state");
    check(tsr_state_add_optimizer(state, "optim", optimizer), "state");
    tsr_saver_options options;
    check(tsr_saver_options_init(&options, sizeof options), "saver");
    options.keep_latest = 1;
    check(tsr_saver_create(comm, root.c_str(), &options, &saver), "saver");
    int64_t step = 0;
    check(tsr_saver_resume(saver, state, &step), "resume");
    tsr_tensor grad;
    check(tsr_ddp_grad(ddp, 0, &grad), "gradient");
    const bool is_back = exists(times + "/killed");
    tsr_status status = TSR_OK;
    for (bool first = true; status == TSR_OK && step < 40; first = false) {
        if (!is_back && rank == 1 && step == 25) {
            write_time(times + "/killed");
            ::raise(SIGKILL);
        }
        for (int64_t i = 0; i < size; ++i) static_cast<float*>(grad.data)[i] = weights[static_cast<size_t>(i)] - 1;
        check(tsr_ddp_ready(ddp, 0), "ready");
        status = tsr_ddp_wait(ddp);
        if (status != TSR_OK) break;
        check(tsr_optimizer_step(optimizer), "step");
        check(tsr_ddp_zero_grad(ddp), "gradient");
        if (is_back && first) write_time(times + "/back-" + std::to_string(rank));
        if (++step % 10 == 0) status = tsr_saver_save(saver, step, state);
    }
    tsr_saver_destroy(saver);
    tsr_state_destroy(state);
    tsr_optimizer_destroy(optimizer);
    tsr_ddp_destroy(ddp);
    return status;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    tsr_comm* comm = nullptr;
    check(tsr_comm_from_env(nullptr, &comm), "join");
    while (train(comm, argv[1], argv[2]) != TSR_OK) {
        if (std::getenv("TESSERA_REPLACEMENT") == nullptr) return 1;
        tsr_comm* grown = nullptr;
        check(tsr_comm_grow(comm, nullptr, &grown), "grow");
        tsr_comm_destroy(comm);
        comm = grown;
    }
    check(tsr_comm_finalize(comm), "end");
    tsr_comm_destroy(comm);
    return 0;
}
