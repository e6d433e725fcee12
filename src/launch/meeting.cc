#include "launch/meeting.hpp"

#include <fmt/core.h>
#include <openssl/crypto.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/env.hpp"
#include "base/error.hpp"
#include "store/address.hpp"
#include "store/server.hpp"
#include "store/tcp_store.hpp"

namespace tsr {

namespace {

// How long the server stays at the end of rank 0's process for ranks that have not yet left.
constexpr milliseconds farewell{2000};
// Until then a store that rejects this process's token may belong to another job that uses one of our ports.
constexpr milliseconds patience_with_strangers{10000};

StoreOptions options_for(const JobEnvironment& job, milliseconds timeout) {
    StoreOptions options = StoreOptions::from_environment();
    options.job_id = job.job_id;
    options.epoch = job.epoch;
    options.timeout = timeout;
    return options;
}

std::shared_ptr<StoreServer> serve(const JobEnvironment& job) {
    const StoreOptions options = options_for(job, milliseconds{1});
    std::string taken;
    for (const Address& candidate : job.candidates) {
        const std::string host = env_text("TESSERA_STORE_BIND").value_or(candidate.host);
        try {
            return StoreServer::start(host, candidate.port, options);
        } catch (const Error& error) {
            if (error.record()->native_code == EADDRNOTAVAIL) {
                throw Error(
                    Code::io,
                    fmt::format("rank 0 cannot serve the store on {}: this host does not have that address; run "
                                "rank 0 on the host that MASTER_ADDR names, or set TESSERA_STORE_BIND to "
                                "another address to listen on",
                                host))
                    .caused_by(error);
            }
            if (error.record()->native_code != EADDRINUSE) throw;
            taken += fmt::format("{}{}", taken.empty() ? "" : ", ", candidate.port);
        }
    }
    throw Error(Code::io,
                fmt::format("rank 0 cannot serve the store: the ports {} are all in use; set TESSERA_STORE_PORT "
                            "to a free port on all ranks",
                            taken));
}

std::string why_there_is_no_store(const Address& address) {
    try {
        check_host(address.host);
    } catch (const Error& error) {
        return error.what();
    }
    return "check that rank 0 has started and runs on that host";
}

// Searches the candidate ports for rank 0's store, repeatedly.
std::shared_ptr<Store> find_store(const JobEnvironment& job, milliseconds timeout) {
    const Deadline deadline = Deadline::in(timeout);
    const Deadline patience = Deadline::in(std::min(timeout, patience_with_strangers));
    if (job.candidates.size() == 1) return Store::open(job.candidates.front().uri(), options_for(job, timeout));
    for (milliseconds pause{5};; pause = std::min(pause * 2, poll_slice)) {
        std::optional<Error> refused;
        std::optional<Error> last;
        for (const Address& candidate : job.candidates) {
            try {
                // Long enough for one connection and its handshake, short enough to look at the next in time.
                return connect_tcp_store(candidate, options_for(job, timeout),
                                         Deadline::in(milliseconds{2000}).earlier(deadline));
            } catch (const Error& error) {
                const bool stranger = error.code() == Code::permission || error.code() == Code::version;
                const bool may_come = error.record()->retriable || error.code() == Code::timeout;
                if (!stranger && !may_come) throw;  // an interrupt, or wrong settings of this rank
                (stranger ? refused : last) = error;
            }
        }
        if (refused && patience.expired()) throw *refused;
        if (deadline.expired()) {
            throw Error(
                Code::timeout,
                fmt::format("rank {} found no store of rank 0 at {} (and the {} ports after it) within {} ms: {}",
                            job.rank, job.candidates.front().uri(), job.candidates.size() - 1, timeout.count(),
                            why_there_is_no_store(job.candidates.front())))
                .with_rank(job.rank)
                .with_peer(0)
                .caused_by(*last);
        }
        poll_interrupt();
        std::this_thread::sleep_for(pause);
    }
}

// The environment belongs to the process, and so do the servers that rank 0 creates from it.
class Meeting {
   public:
    // OpenSSL also cleans up at process exit: initialised first, it does so after this object is destroyed.
    Meeting() { (void)OPENSSL_init_crypto(OPENSSL_INIT_LOAD_CRYPTO_STRINGS, nullptr); }
    ~Meeting() {
        if (owner_ != ::getpid()) return;
        leave_job();
        const Deadline deadline = Deadline::in(farewell);
        for (; !former_.empty() && !deadline.expired(); std::this_thread::sleep_for(milliseconds{5})) {
            drop_deserted_servers();
        }
    }

    std::shared_ptr<Store> store(const JobEnvironment& job, milliseconds timeout) {
        const std::lock_guard lock(mutex_);
        if (job != job_) leave_job();
        job_ = job;
        drop_deserted_servers();
        if (std::shared_ptr<Store> open = store_.lock()) return open;
        std::shared_ptr<Store> fresh;
        if (!job.store_uri.empty()) {
            fresh = Store::open(job.store_uri, options_for(job, timeout));
        } else if (job.rank == 0) {
            if (!server_) server_ = serve(job);
            fresh = Store::open(server_->uri(), options_for(job, timeout));
        } else {
            fresh = find_store(job, timeout);
        }
        store_ = fresh;
        return fresh;
    }

   private:
    void leave_job() {
        store_.reset();
        if (server_) former_.push_back(std::move(server_));
        server_ = nullptr;
    }
    void drop_deserted_servers() {
        std::erase_if(former_, [](const auto& server) { return server->census().clients == 0; });
    }

    std::mutex mutex_;  // guards what follows
    JobEnvironment job_;
    std::shared_ptr<StoreServer> server_;               // of job_
    std::vector<std::shared_ptr<StoreServer>> former_;  // of jobs before it, whose ranks have not all left yet
    std::weak_ptr<Store> store_;
    pid_t owner_ = ::getpid();
};

Meeting& meeting() {
    static Meeting instance;
    return instance;
}

}  // namespace

std::shared_ptr<Store> store_from_environment(const JobEnvironment& job, milliseconds timeout) {
    return meeting().store(job, timeout);
}

}  // namespace tsr
