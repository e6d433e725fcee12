// Who saves into a root. One live job at a time: rank 0 holds `<root>/.owner`, which names host, process and save
// group. A thread renews it. Its holder is dead if it is known to be: on the same machine its process is gone, or runs
// another program since an exec. A process that cannot be seen (another machine's, another pid namespace's, another
// user's under hidepid) lives until it has not renewed the file for lease_span.
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
#include "checkpoint/io/file_system.hpp"

namespace tsr {

inline constexpr std::string_view owner_name = ".owner";
inline constexpr int64_t max_lease_bytes = 4096;

struct Holder {
    std::string id;  // of the saver: random
    std::string host;
    std::string machine;  // boot id, pid namespace, time namespace: where a pid and a start time mean the same process
    int64_t pid = 0;
    int64_t start_time = 0;  // of the process, in clock ticks since boot; 0: unknown
    std::string image;       // of the program in it: another one after each exec; empty: unknown

    [[nodiscard]] static Holder this_process(std::string id);
    [[nodiscard]] static Holder parse(std::string_view text);  // CORRUPT
    [[nodiscard]] std::string dump() const;
};

struct LeaseTimes {
    std::chrono::milliseconds renew{10000};
    std::chrono::milliseconds span{60000};
};

// What this process can tell of itself and of another one.
class ProcessView {
   public:
    struct Look {
        bool gone = false;                // there is no process of that number
        std::optional<ProcessStat> stat;  // none: it cannot be seen
    };
    ProcessView() = default;
    virtual ~ProcessView() = default;
    ProcessView(const ProcessView&) = delete;
    ProcessView& operator=(const ProcessView&) = delete;

    [[nodiscard]] virtual Holder self() const { return Holder::this_process(""); }
    [[nodiscard]] virtual Look look(int64_t pid) const;
};

enum class Seen { alive, dead, not_visible };  // a lease's holder
enum class Boot { same, other, unknown };      // its host's, compared with this one's
struct Sight {
    Seen seen = Seen::not_visible;
    Boot boot = Boot::unknown;
};
[[nodiscard]] Sight sight_of(const Holder& holder, const ProcessView& view);

// How long ago a lease was renewed; negative: in the future. nullopt: that cannot be told.
using LeaseAge = std::optional<std::chrono::nanoseconds>;

// Whether a lease counts.
[[nodiscard]] bool is_live(const Sight& sight, LeaseAge age, const LeaseTimes& times);
// Of the holder of the lease file `path`.
[[nodiscard]] bool is_live(FileSystem& files, const std::string& path, const Holder& holder, const LeaseTimes& times,
                           const ProcessView& view = {});

// INVALID_STATE names host and pid of the live job that holds `root`, as taking its lease would; changes nothing.
void check_not_held(FileSystem& files, const std::string& root, const LeaseTimes& times = {});

class Lease {
   public:
    // INVALID_STATE names host and pid of the job that holds `root`.
    Lease(FileSystem& files, const std::string& root, std::string id, const LeaseTimes& times = {});
    ~Lease();  // gives the root back
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    // Throws INVALID_STATE if someone has taken the root over, and what stops it from looking.
    void check() const { check(files_); }
    void check(FileSystem& files) const;  // in a root that is held

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

// 128 random bits as 32 hexadecimal digits.
[[nodiscard]] std::string random_id();
// The same in a UUID's form (version 4).
[[nodiscard]] std::string random_uuid();

}  // namespace tsr
