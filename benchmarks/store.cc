// How many operations a second the TCP store answers on loopback: one server process, and client processes, each with one
// connection, that set and get small values back to back. Prints one JSON line a round: {"operations": per second}.
//
//   store CLIENTS ROUNDS        TESSERA_TLS=psk: encrypted
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "store/server.hpp"
#include "store/store.hpp"

namespace {

using namespace tsr;
using std::chrono::duration;

constexpr milliseconds warm_up{100};
constexpr milliseconds measured{500};
constexpr int most_clients = 256;

// All processes share it. Relaxed would do: the phases are a time apart.
struct Shared {
    std::atomic<int> port{0};
    std::atomic<int> connected{0};
    std::atomic<int> failed{0};
    std::atomic<bool> go{false};
    std::atomic<bool> stop{false};
    struct alignas(64) Count {
        std::atomic<uint64_t> operations{0};
    };
    Count counts[most_clients];
};

template <class Ready>
void wait_for(const Shared& shared, Ready&& ready) {
    while (!ready()) {
        if (shared.failed > 0) throw std::runtime_error("another process failed");
        std::this_thread::sleep_for(milliseconds{1});
    }
}

StoreOptions options() {
    StoreOptions options;
    options.token = std::string(64, 'a');
    options.job_id = "bench";
    return options;
}

void serve(Shared& shared) {
    const auto server = StoreServer::start("127.0.0.1", 0, options());
    shared.port = server->port();
    wait_for(shared, [] { return false; });  // it is killed
}

void ask(Shared& shared, int client) {
    wait_for(shared, [&] { return shared.port != 0; });
    const auto store = Store::open("tcp://127.0.0.1:" + std::to_string(shared.port), options());
    const std::string key = "ranks/" + std::to_string(client) + "/address";
    const std::string value(32, 'v');
    std::atomic<uint64_t>& count = shared.counts[client].operations;
    ++shared.connected;
    wait_for(shared, [&] { return shared.go.load(); });
    while (!shared.stop.load(std::memory_order_relaxed)) {
        store->set(key, value, store->default_deadline());
        if (store->get(key, store->default_deadline()) != value) throw std::runtime_error("another value came back");
        count.fetch_add(2, std::memory_order_relaxed);
    }
}

double one_round(int clients) {
    void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    Shared& shared = *new (memory) Shared;
    std::vector<pid_t> children;
    for (int child = 0; child <= clients; ++child) {
        const pid_t pid = ::fork();
        if (pid < 0) throw std::runtime_error("fork failed");
        if (pid > 0) {
            children.push_back(pid);
            continue;
        }
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        try {
            child == 0 ? serve(shared) : ask(shared, child - 1);
        } catch (const std::exception& error) {
            if (shared.failed++ == 0) std::fprintf(stderr, "store: %s\n", error.what());
            ::_exit(1);
        }
        ::_exit(0);
    }
    const auto operations = [&] {
        uint64_t sum = 0;
        for (int client = 0; client < clients; ++client) sum += shared.counts[client].operations;
        return sum;
    };
    wait_for(shared, [&] { return shared.connected == clients; });
    shared.go = true;
    std::this_thread::sleep_for(warm_up);
    const uint64_t before = operations();
    const auto begin = std::chrono::steady_clock::now();
    std::this_thread::sleep_for(measured);
    const uint64_t after = operations();
    const double seconds = duration<double>(std::chrono::steady_clock::now() - begin).count();
    shared.stop = true;
    for (const pid_t pid : children) {
        if (pid != children.front()) (void)::waitpid(pid, nullptr, 0);
    }
    ::kill(children.front(), SIGKILL);
    (void)::waitpid(children.front(), nullptr, 0);
    ::munmap(memory, sizeof(Shared));
    return static_cast<double>(after - before) / seconds;
}

}  // namespace

int main(int argc, char** argv) {
    const int clients = argc == 3 ? std::atoi(argv[1]) : 0;
    if (clients < 1 || clients > most_clients) {
        std::fprintf(stderr, "usage: store CLIENTS ROUNDS, with 1 to %d clients\n", most_clients);
        return 2;
    }
    try {
        for (int round = 0; round < std::atoi(argv[2]); ++round) {
            std::printf("{\"operations\": %.0f}\n", one_round(clients));
            std::fflush(stdout);
        }
    } catch (const std::exception& error) {
        std::fprintf(stderr, "store: %s\n", error.what());
        return 1;
    }
    return 0;
}
