// The meters (base/meter.hpp) of the ranks of this host: memory with a page for each, which the ranks write and the agent
// reads. TESSERA_METER_FD names the inherited descriptor, TESSERA_METER_FILE a path to the same memory for processes that
// did not inherit it, TESSERA_METER_PAGES the number of pages; a rank's page is the one with its local rank.
#pragma once

#include <cstddef>

#include "base/fd.hpp"
#include "base/ticks.hpp"
#include "launch/job_status.hpp"

namespace tsr {

class MeterPages {
   public:
    explicit MeterPages(size_t ranks);
    ~MeterPages();
    MeterPages(const MeterPages&) = delete;
    MeterPages& operator=(const MeterPages&) = delete;

    [[nodiscard]] int fd() const { return file_.get(); }
    [[nodiscard]] size_t size() const { return ranks_; }
    // Ranks may have written anything: what no meter counts reads as 0.
    [[nodiscard]] RankFigures read(size_t place) const;
    // For another process of that rank.
    void clear(size_t place);

   private:
    const size_t ranks_;
    const TickScale::Mark made_ = TickScale::Mark::now();
    Fd file_;
    const std::byte* pages_ = nullptr;
};

// The rank's side: from now on this process counts in the page that the environment names, if there is one. Thread-safe.
void count_for_agent();

}  // namespace tsr
