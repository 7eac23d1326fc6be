// Streams, events and graphs: all work is done at once, except what is captured, which is never done.
#include "driver.h"
#include <stdlib.h>

typedef struct {
  bool capturing;
  struct Graph *graph;
} Stream;

typedef struct Graph {
  size_t count, room;
  struct Node **nodes;
} Graph;

typedef struct Node {
  CUgraphNodeType kind;
} Node;

bool is_capturing(CUstream stream) {
  // 0, 1 and 2 are streams that a context has from the start; launches that are only recorded have made-up ones, too.
  return (uintptr_t)stream > 4096 && ((Stream *)stream)->capturing;
}

CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority) {
  (void)flags, (void)priority;
  *out = (CUstream)calloc(1, sizeof(Stream));
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *out, unsigned flags) { return cuStreamCreateWithPriority(out, flags, 0); }

CUresult cuStreamDestroy(CUstream stream) {
  free(stream);
  return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
  return is_capturing(stream) ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream stream) { return cuStreamSynchronize(stream); }
CUresult cuCtxSynchronize(void) { return CUDA_SUCCESS; }

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  (void)stream, (void)event, (void)flags;
  return CUDA_SUCCESS;
}

CUresult cuStreamGetPriority(CUstream stream, int *out) {
  (void)stream;
  *out = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *data) {
  if (!is_capturing(stream)) function(data);
  return CUDA_SUCCESS;
}

CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback function, void *data, unsigned flags) {
  (void)flags;
  function(stream, CUDA_SUCCESS, data);
  return CUDA_SUCCESS;
}

// --- events ----------------------------------------------------------------------------------------------------------

CUresult cuEventCreate(CUevent *out, unsigned flags) {
  (void)flags;
  *out = (CUevent)calloc(1, 8);
  return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) {
  free(event);
  return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  (void)event, (void)stream;
  return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
  (void)event;
  return CUDA_SUCCESS;
}

CUresult cuEventSynchronize(CUevent event) {
  (void)event;
  return CUDA_SUCCESS;
}

#undef cuEventElapsedTime
// A hundredth of a millisecond, so that nobody divides by zero.
CUresult cuEventElapsedTime(float *out, CUevent begin, CUevent end) {
  (void)begin, (void)end;
  *out = 0.01f;
  return CUDA_SUCCESS;
}

CUresult cuEventElapsedTime_v2(float *out, CUevent begin, CUevent end) { return cuEventElapsedTime(out, begin, end); }

// --- capture ---------------------------------------------------------------------------------------------------------

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *out) {
  *out = is_capturing(stream) ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *after,
                                     const CUgraphEdgeData *edges,
                                     size_t count, CUstreamCaptureMode mode) {
  (void)after, (void)edges, (void)count, (void)mode;
  if ((uintptr_t)stream <= 4096 || is_capturing(stream)) return CUDA_ERROR_ILLEGAL_STATE;
  ((Stream *)stream)->capturing = true;
  ((Stream *)stream)->graph = (Graph *)graph;
  return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  return cuStreamBeginCaptureToGraph(stream, (CUgraph)calloc(1, sizeof(Graph)), NULL, NULL, 0, mode);
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *out) {
  if (!is_capturing(stream)) return CUDA_ERROR_ILLEGAL_STATE;
  ((Stream *)stream)->capturing = false;
  if (out) *out = (CUgraph)((Stream *)stream)->graph;
  return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  (void)mode;
  return CUDA_SUCCESS;
}

// --- graphs ----------------------------------------------------------------------------------------------------------

static CUgraphNode add(CUgraph handle, CUgraphNodeType kind) {
  Graph *graph = (Graph *)handle;
  if (graph->count == graph->room) {
    graph->room = graph->room ? 2 * graph->room : 16;
    graph->nodes = realloc(graph->nodes, graph->room * sizeof *graph->nodes);
  }
  Node *node = calloc(1, sizeof *node);
  node->kind = kind;
  return (CUgraphNode)(graph->nodes[graph->count++] = node);
}

void capture_kernel(CUstream stream) {
  if (is_capturing(stream)) add((CUgraph)((Stream *)stream)->graph, CU_GRAPH_NODE_TYPE_KERNEL);
}

CUresult cuGraphCreate(CUgraph *out, unsigned flags) {
  (void)flags;
  *out = (CUgraph)calloc(1, sizeof(Graph));
  return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
  (void)graph; // its nodes may be a child's of another
  return CUDA_SUCCESS;
}

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode *out, size_t *count) {
  Graph *graph = (Graph *)handle;
  for (size_t i = 0; out && i < *count && i < graph->count; i++) out[i] = (CUgraphNode)graph->nodes[i];
  *count = graph->count;
  return CUDA_SUCCESS;
}

CUresult cuGraphGetRootNodes(CUgraph graph, CUgraphNode *out, size_t *count) { return cuGraphGetNodes(graph, out,
                             count); }

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *out) {
  *out = ((Node *)node)->kind;
  return CUDA_SUCCESS;
}

CUresult cuGraphAddChildGraphNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                                  CUgraph child) {
  (void)after, (void)count, (void)child;
  *out = add(graph, CU_GRAPH_NODE_TYPE_GRAPH);
  return CUDA_SUCCESS;
}

CUresult cuGraphAddKernelNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                              const CUDA_KERNEL_NODE_PARAMS *node) {
  (void)after, (void)count;
  *out = add(graph, CU_GRAPH_NODE_TYPE_KERNEL);
  return check_launch((Function *)node->func, (uint32_t[]){node->gridDimX, node->gridDimY, node->gridDimZ},
                      (uint32_t[]){node->blockDimX, node->blockDimY, node->blockDimZ}, node->sharedMemBytes,
                      node->kernelParams);
}

CUresult cuGraphAddMemcpyNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                              const CUDA_MEMCPY3D *node, CUcontext context) {
  (void)after, (void)count, (void)node, (void)context;
  *out = add(graph, CU_GRAPH_NODE_TYPE_MEMCPY);
  return CUDA_SUCCESS;
}

CUresult cuGraphAddMemsetNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                              const CUDA_MEMSET_NODE_PARAMS *node, CUcontext context) {
  (void)after, (void)count, (void)node, (void)context;
  *out = add(graph, CU_GRAPH_NODE_TYPE_MEMSET);
  return CUDA_SUCCESS;
}

CUresult cuGraphAddEmptyNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count) {
  (void)after, (void)count;
  *out = add(graph, CU_GRAPH_NODE_TYPE_EMPTY);
  return CUDA_SUCCESS;
}

#undef cuGraphAddNode
CUresult cuGraphAddNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges,
                           size_t count, CUgraphNodeParams *node) {
  (void)after, (void)edges, (void)count;
  *out = add(graph, node->type);
  if (node->type != CU_GRAPH_NODE_TYPE_KERNEL) return CUDA_SUCCESS;
  const CUDA_KERNEL_NODE_PARAMS_v3 *kernel = &node->kernel;
  return check_launch((Function *)kernel->func, (uint32_t[]){kernel->gridDimX, kernel->gridDimY, kernel->gridDimZ},
                      (uint32_t[]){kernel->blockDimX, kernel->blockDimY, kernel->blockDimZ}, kernel->sharedMemBytes,
                      kernel->kernelParams);
}

CUresult cuGraphAddNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *after, size_t count,
                        CUgraphNodeParams *node) {
  return cuGraphAddNode_v2(out, graph, after, NULL, count, node);
}

CUresult cuGraphExecNodeSetParams(CUgraphExec graph, CUgraphNode node, CUgraphNodeParams *parameters) {
  (void)graph, (void)node, (void)parameters;
  return CUDA_SUCCESS;
}

CUresult cuGraphInstantiate(CUgraphExec *out, CUgraph graph, unsigned long long flags) {
  (void)flags;
  record("'call': 'graph', 'nodes': %zu", ((Graph *)graph)->count);
  *out = (CUgraphExec)calloc(1, 8);
  return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream) {
  (void)graph, (void)stream;
  record("'call': 'graph launch'");
  return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec graph) {
  free(graph);
  return CUDA_SUCCESS;
}

CUresult cuGraphExecUpdate(CUgraphExec graph, CUgraph other, CUgraphExecUpdateResultInfo *result) {
  (void)graph, (void)other;
  result->result = CU_GRAPH_EXEC_UPDATE_SUCCESS;
  return CUDA_SUCCESS;
}

CUresult cuGraphExecKernelNodeSetParams(CUgraphExec graph, CUgraphNode node,
                                        const CUDA_KERNEL_NODE_PARAMS *parameters) {
  (void)graph, (void)node, (void)parameters;
  return CUDA_SUCCESS;
}

CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec graph, CUgraphNode node, CUgraph child) {
  (void)graph, (void)node, (void)child;
  return CUDA_SUCCESS;
}

CUresult cuGraphExecMemcpyNodeSetParams(CUgraphExec graph, CUgraphNode node, const CUDA_MEMCPY3D *parameters,
                                        CUcontext context) {
  (void)graph, (void)node, (void)parameters, (void)context;
  return CUDA_SUCCESS;
}

CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec graph, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *parameters,
                                        CUcontext context) {
  (void)graph, (void)node, (void)parameters, (void)context;
  return CUDA_SUCCESS;
}

CUresult cuGraphKernelNodeSetAttribute(CUgraphNode node, CUkernelNodeAttrID attribute,
                                       const CUkernelNodeAttrValue *value) {
  (void)node, (void)attribute, (void)value;
  return CUDA_SUCCESS;
}

CUresult cuGraphDebugDotPrint(CUgraph graph, const char *path, unsigned flags) {
  (void)graph, (void)path, (void)flags;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *out) {
  (void)device, (void)attribute;
  *(uint64_t *)out = 0;
  return CUDA_SUCCESS;
}
