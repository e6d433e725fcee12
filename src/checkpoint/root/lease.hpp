// The lease on a root: only one live job at a time may save into it. Rank 0 holds `<root>/.owner`, which names host,
// process and save group, and a thread renews it. The holder is dead if that is certain: on the same machine, its
// process is gone or has run another program since an exec. A process that is not visible (on another machine, in
// another pid namespace, another user's under hidepid) counts as alive until it has not renewed the file for
// LeaseTimes::span. A new round of a job under `tessera run` may begin on other hosts, while the lease of the former one
// lives, whose host is lost: it waits for that lease to expire.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include "base/proc.hpp"
#include "base/random_id.hpp"
#include "checkpoint/io/file_system.hpp"

namespace tsr {

inline constexpr std::string_view owner_name = ".owner";
inline constexpr int64_t max_lease_bytes = 4096;

struct Holder {
    std::string id;  // of the saver: random
    std::string host;
    std::string machine;  // boot id, pid and time namespace: within it a pid and a start time identify a process
    int64_t pid = 0;
    int64_t start_time = 0;  // of the process, in clock ticks since boot; 0: unknown
    std::string image;       // identifies the program: changes with each exec; empty: unknown
    std::string job = {};    // of `tessera run`; empty: another launcher's
    int64_t epoch = 0;       // the job's

    [[nodiscard]] static Holder this_process(std::string id);
    [[nodiscard]] static Holder parse(std::string_view text);  // CORRUPT
    [[nodiscard]] std::string dump() const;
};

struct LeaseTimes {
    std::chrono::milliseconds renew{10000};
    std::chrono::milliseconds span{60000};
};

// What this process can learn about itself and other processes. A class for tests.
class ProcessView {
   public:
    struct Look {
        bool gone = false;                // no process has that pid
        std::optional<ProcessStat> stat;  // nullopt: not visible
    };
    ProcessView() = default;
    virtual ~ProcessView() = default;
    ProcessView(const ProcessView&) = delete;
    ProcessView& operator=(const ProcessView&) = delete;

    [[nodiscard]] virtual Holder self() const { return Holder::this_process(""); }
    [[nodiscard]] virtual Look look(int64_t pid) const;
};

enum class Seen { alive, dead, not_visible };  // the holder of a lease
enum class Boot { same, other, unknown };      // boot id of its host, compared with this host's
struct Sight {
    Seen seen = Seen::not_visible;
    Boot boot = Boot::unknown;
};
[[nodiscard]] Sight sight_of(const Holder& holder, const ProcessView& view);

// Time since a lease was renewed; negative: in the future; nullopt: unknown.
using LeaseAge = std::optional<std::chrono::nanoseconds>;

// Whether a lease is in force.
[[nodiscard]] bool is_live(const Sight& sight, LeaseAge age, const LeaseTimes& times);
// The same for the lease file `path` and its holder.
[[nodiscard]] bool is_live(FileSystem& files, const std::string& path, const Holder& holder, const LeaseTimes& times,
                           const ProcessView& view = {});

// Throws INVALID_STATE, naming host and pid, if a live job holds `root`. Changes nothing.
void check_not_held(FileSystem& files, const std::string& root, const LeaseTimes& times = {});

class Lease {
   public:
    // Takes the lease. INVALID_STATE, naming host and pid, if another live job holds `root`; at once, unless the holder may
    // be what is left of an earlier round of this job.
    Lease(FileSystem& files, const std::string& root, std::string id, const LeaseTimes& times = {});
    ~Lease();  // releases the root
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    // Throws INVALID_STATE if another job has taken over the root, or the error that prevented the check.
    void check() const { check(files_); }
    void check(FileSystem& files) const;  // in a held root

   private:
    void acquire(FileSystem& files);
    void remove_if_dead(FileSystem& files, const std::string& mark);
    void remove_old_attempts(FileSystem& files);
    void renew();

    FileSystem& files_;
    std::string path_;
    Holder self_;
    LeaseTimes times_;
    std::mutex mutex_;
    std::condition_variable stop_changed_;
    bool stop_ = false;  // guarded by mutex_
    std::thread renewer_;
};

// A UUID of version 4.
[[nodiscard]] std::string random_uuid();

}  // namespace tsr
