{{/* (root, role, its values): the pod of a worker, for a StatefulSet and a LeaderWorkerSet alike */}}
{{- define "pd.workerPod" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- $v := index . 2 -}}
{{- $name := printf "%s-%s" (include "pd.fullname" $root) $role -}}
{{- $domain := printf "%s.%s.svc.%s" $name $root.Release.Namespace $root.Values.clusterDomain -}}
{{- $lws := eq $v.workload "LeaderWorkerSet" -}}
{{- $rdma := $v.rdma -}}
{{- $extended := dict -}}
{{- if $v.gpus.count }}{{ $_ := set $extended $v.gpus.resourceName (int $v.gpus.count) }}{{ end -}}
{{- if $rdma.enabled }}{{ $_ := set $extended $rdma.resourceName (int $rdma.count) }}{{ end -}}
{{- if and $rdma.enabled $rdma.hugepages }}{{ $_ := set $extended "hugepages-2Mi" $rdma.hugepages }}{{ end -}}
metadata:
  labels:
    {{- with $v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- include "pd.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $role }}
  annotations:
    checksum/config: {{ include "pd.clusterFile" $root | sha256sum }}
    {{- with $rdma.networkAnnotation }}
    k8s.v1.cni.cncf.io/networks: {{ . }}
    {{- end }}
    {{- with $v.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "pd.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "pd.gracePeriod" (list $v.drain $v.terminationGracePeriodSeconds $role) }}
  {{- if $v.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with include "pd.scheduling" (list $root $v $role) | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  securityContext:
    {{- include "pd.podSecurityContext" $root | nindent 4 }}
  containers:
    - name: worker
      image: {{ include "pd.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [pd-cluster, worker]
      args:
        - --role={{ $role }}
        - --config=/etc/pd-cluster/cluster.toml
        - --host=$(POD_IP)
        {{- if $lws }}
        - --engine=$(ENGINE)
        - --node=$(LWS_WORKER_INDEX)
        - --head=$(LWS_LEADER_ADDRESS)
        {{- else }}
        - --ordinal=$(POD_NAME)
        - --head={{ $name }}-{ordinal}.{{ $domain }}
        {{- end }}
        - --num-nodes={{ $v.podsPerEngine }}
        - --control-port={{ $v.ports.control }}
        - --store-port={{ $v.ports.store }}
        - --http-port={{ $v.ports.probes }}
        - --drain-timeout={{ $v.drain.timeoutSeconds }}
        - --log-format={{ $v.logFormat }}
      env:
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        {{- if $lws }}
        - name: ENGINE
          valueFrom:
            fieldRef:
              fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/group-index']
        {{- else }}
        - name: POD_NAME
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        {{- end }}
        {{- include "pd.env" $root | nindent 8 }}
        {{- with $v.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- range $index := until (include "pd.leadsPerPod" (list $v $role) | int) }}
        - name: control-{{ $index }}
          containerPort: {{ add $v.ports.control $index }}
        {{- end }}
        {{- if gt (int $v.podsPerEngine) 1 }}
        - name: store
          containerPort: {{ $v.ports.store }}
        {{- end }}
        - name: probes
          containerPort: {{ $v.ports.probes }}
      startupProbe:
        httpGet: {path: /startupz, port: probes}
        periodSeconds: {{ $v.startup.periodSeconds }}
        failureThreshold: {{ $v.startup.failureThreshold }}
      livenessProbe:
        httpGet: {path: /livez, port: probes}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /readyz, port: probes}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      lifecycle:
        preStop:
          exec:
            command:
              - pd-cluster
              - prestop
              - --delay={{ $v.drain.delaySeconds }}
              - --drain-timeout={{ $v.drain.timeoutSeconds }}
      resources:
        {{- $limits := merge (deepCopy $extended) (default dict $v.resources.limits) }}
        {{- $requests := merge (deepCopy $extended) (default dict $v.resources.requests) }}
        {{- with $requests }}
        requests:
          {{- toYaml . | nindent 10 }}
        {{- end }}
        {{- with $limits }}
        limits:
          {{- toYaml . | nindent 10 }}
        {{- end }}
      securityContext:
        {{- include "pd.containerSecurityContext" (ternary (list "IPC_LOCK") list (and $rdma.enabled $rdma.ipcLock)) | nindent 8 }}
      volumeMounts:
        {{- include "pd.volumeMounts" $root | nindent 8 }}
        - name: shm
          mountPath: /dev/shm
        {{- if and $rdma.enabled $rdma.hugepages }}
        - name: hugepages
          mountPath: /hugepages
        {{- end }}
        {{- with $v.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "pd.volumes" (list $root $v.tmpSizeLimit) | nindent 4 }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $v.shm.sizeLimit }}
    {{- if and $rdma.enabled $rdma.hugepages }}
    - name: hugepages
      emptyDir:
        medium: HugePages-2Mi
    {{- end }}
    {{- with $v.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
