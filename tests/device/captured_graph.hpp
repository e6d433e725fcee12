// A CUDA graph, captured from a stream of a simulated device or a real one.
#pragma once

#include <gtest/gtest.h>

#include "base/function_ref.hpp"
#include "device/device.hpp"

struct CUgraph_st;
struct CUgraphExec_st;

extern "C" {
int cuStreamBeginCapture_v2(void* stream, int mode);
int cuStreamEndCapture(void* stream, CUgraph_st** graph);
int cuGraphInstantiateWithFlags(CUgraphExec_st** made, CUgraph_st* graph, unsigned long long flags);
int cuGraphLaunch(CUgraphExec_st* graph, void* stream);
int cuGraphExecDestroy(CUgraphExec_st* graph);
int cuGraphDestroy(CUgraph_st* graph);
}

namespace tsr::testing {

// What `body` enqueues on a stream of a device, to be run there as often as one likes.
class CapturedGraph {
   public:
    CapturedGraph(DeviceApi& api, StreamHandle stream, FunctionRef<void()> body) : api_(api), stream_(stream) {
        constexpr int as_by_default =
            0;  // CU_STREAM_CAPTURE_MODE_GLOBAL: no thread may call what would disturb the capture
        EXPECT_EQ(cuStreamBeginCapture_v2(stream, as_by_default), 0);
        body();
        CUgraph_st* graph = nullptr;
        EXPECT_EQ(cuStreamEndCapture(stream, &graph), 0);
        if (graph == nullptr) return;
        api_.in_use([&] { EXPECT_EQ(cuGraphInstantiateWithFlags(&graph_, graph, 0), 0); });
        cuGraphDestroy(graph);
    }
    ~CapturedGraph() {
        if (graph_ != nullptr) cuGraphExecDestroy(graph_);
    }
    CapturedGraph(const CapturedGraph&) = delete;
    CapturedGraph& operator=(const CapturedGraph&) = delete;

    void launch() const {
        api_.in_use([&] { EXPECT_EQ(cuGraphLaunch(graph_, stream_), 0); });
    }

   private:
    DeviceApi& api_;
    StreamHandle stream_;
    CUgraphExec_st* graph_ = nullptr;
};

}  // namespace tsr::testing
