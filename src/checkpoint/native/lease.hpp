// Who saves into a root. One live job at a time: rank 0 holds `<root>/.owner`, which names host, process and save
// group. On the same machine a holder is dead when its process is gone (pid and start time, seen from the same pid
// namespace); from elsewhere, when it has not renewed the file for lease_span. A thread renews it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "checkpoint/io/file_system.hpp"

namespace tsr {

inline constexpr std::string_view owner_name = ".owner";
inline constexpr int64_t max_lease_bytes = 4096;

struct Holder {
    std::string id;  // of the saver: random
    std::string host;
    std::string machine;  // boot id and pid namespace: where a pid means the same process
    int64_t pid = 0;
    int64_t start_time = 0;  // of the process, in clock ticks since boot

    [[nodiscard]] static Holder this_process(std::string id);
    [[nodiscard]] static Holder parse(std::string_view text);  // CORRUPT
    [[nodiscard]] std::string dump() const;
};

struct LeaseTimes {
    std::chrono::milliseconds renew{10000};
    std::chrono::milliseconds span{60000};
};

// Whether the holder of the lease file `path` still lives.
[[nodiscard]] bool is_live(FileSystem& files, const std::string& path, const Holder& holder, const LeaseTimes& times);

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
    void check() const;

   private:
    void acquire();
    void remove_if_dead(const std::string& mark);
    void remove_old_attempts();
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
